// Function: main_kernel
__kernel void main_kernel(__global float* restrict compute_intermediate_ptr, __global float* restrict x0_ptr, __global float* restrict x1_ptr);
__kernel void main_kernel(__global float* restrict compute_intermediate_ptr, __global float* restrict x0_ptr, __global float* restrict x1_ptr) {
  float acc_ptr[2];
  __local float pad_temp_0_shared_ptr[720];
  __local float x1_1_shared_ptr[584];
  float pad_temp_0_fragment_ptr[2];
  float x1_1_fragment_ptr[1];
  for (int i = 0; i < 2; ++i) {
    acc_ptr[i] = 0.000000e+00f;
  }
  int cse_v1 = ((convert_int(get_group_id(0))) & 3);
  for (int round = 0; round < 12; ++round) {
    if (((round * 4) + ((convert_int(get_local_id(0))) >> 4)) < 45) {
      int cse_v5 = ((round * 64) + (convert_int(get_local_id(0))));
      int cse_v9 = (((round * 64) + (convert_int(get_local_id(0)))) % 9);
      int cse_v14 = ((((round * 64) + (convert_int(get_local_id(0)))) % 9) * 2);
      int cse_v15 = ((((round * 64) + (convert_int(get_local_id(0)))) % 18) / 9);
      int cse_v17 = (((((round * 64) + (convert_int(get_local_id(0)))) % 9) * 2) + ((((round * 64) + (convert_int(get_local_id(0)))) % 18) / 9));
      if ((((((round * 64) + (convert_int(get_local_id(0)))) % 9) * 2) + ((((round * 64) + (convert_int(get_local_id(0)))) % 18) / 9)) < 17) {
        int cse_v6 = ((round * 32) + ((convert_int(get_local_id(0))) >> 1));
        int cse_v10 = (((round * 32) + ((convert_int(get_local_id(0))) >> 1)) % 45);
        int cse_v16 = ((((round * 32) + ((convert_int(get_local_id(0))) >> 1)) % 45) / 9);
        float condval;
        if (((bool)(((bool)(((bool)(1 <= ((((convert_int(get_group_id(0))) & 3) * 4) + ((((round * 32) + ((convert_int(get_local_id(0))) >> 1)) % 45) / 9)))) && ((bool)((((((round * 32) + ((convert_int(get_local_id(0))) >> 1)) % 45) / 36) + ((convert_int(get_group_id(0))) & 3)) < 4)))) && ((bool)(1 <= (((((round * 64) + (convert_int(get_local_id(0)))) % 9) * 2) + ((((round * 64) + (convert_int(get_local_id(0)))) % 18) / 9)))))) && ((bool)((((round * 64) + (convert_int(get_local_id(0)))) % 9) < 8))) {
          condval = x0_ptr[(((((((((round * 32) + ((convert_int(get_local_id(0))) >> 1)) / 45) * 225) + (((convert_int(get_group_id(0))) & 3) * 60)) + (((((round * 32) + ((convert_int(get_local_id(0))) >> 1)) % 45) / 9) * 15)) + ((((round * 64) + (convert_int(get_local_id(0)))) % 9) * 2)) + ((((round * 64) + (convert_int(get_local_id(0)))) % 18) / 9)) - 16)];
        } else {
          condval = 0.000000e+00f;
        }
        pad_temp_0_shared_ptr[((round * 64) + (convert_int(get_local_id(0))))] = condval;
      }
    }
  }
  int cse_v2 = ((convert_int(get_group_id(0))) >> 2);
  int cse_v3 = ((convert_int(get_local_id(0))) >> 5);
  for (int round_1 = 0; round_1 < 12; ++round_1) {
    int cse_v7 = ((round_1 * 64) + (convert_int(get_local_id(0))));
    int cse_v11 = (((round_1 * 64) + (convert_int(get_local_id(0)))) % 96);
    if ((((round_1 * 64) + (convert_int(get_local_id(0)))) % 96) < 72) {
      int cse_v12 = (((round_1 * 2) + ((convert_int(get_local_id(0))) >> 5)) / 3);
      int cse_v13 = (((round_1 * 64) + (convert_int(get_local_id(0)))) % 3);
      int cse_v18 = (((((round_1 * 64) + (convert_int(get_local_id(0)))) % 96) / 9) * 9);
      int cse_v19 = ((((((round_1 * 64) + (convert_int(get_local_id(0)))) % 96) % 9) / 3) * 3);
      x1_1_shared_ptr[((((((round_1 * 2) + ((convert_int(get_local_id(0))) >> 5)) / 3) * 73) + (((((round_1 * 64) + (convert_int(get_local_id(0)))) % 96) / 3) * 3)) + (((round_1 * 64) + (convert_int(get_local_id(0)))) % 3))] = x1_ptr[((((((convert_int(get_group_id(0))) >> 2) * 576) + ((((round_1 * 2) + ((convert_int(get_local_id(0))) >> 5)) / 3) * 72)) + (((((round_1 * 64) + (convert_int(get_local_id(0)))) % 96) / 3) * 3)) + (((round_1 * 64) + (convert_int(get_local_id(0)))) % 3))];
    }
  }
  int cse_v4 = ((convert_int(get_local_id(0))) & 3);
  int cse_v8 = (((convert_int(get_local_id(0))) & 31) >> 2);
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int v_rc = 0; v_rc < 8; ++v_rc) {
    for (int v_ry = 0; v_ry < 3; ++v_ry) {
      for (int v_rx = 0; v_rx < 3; ++v_rx) {
        for (int piece = 0; piece < 2; ++piece) {
          pad_temp_0_fragment_ptr[piece] = pad_temp_0_shared_ptr[(((((((v_rc * 90) + (((convert_int(get_local_id(0))) >> 5) * 36)) + (v_ry * 18)) + ((v_rx & 1) * 9)) + (piece * 4)) + (v_rx >> 1)) + ((convert_int(get_local_id(0))) & 3))];
        }
        x1_1_fragment_ptr[0] = x1_1_shared_ptr[(((((((convert_int(get_local_id(0))) & 31) >> 2) * 73) + (v_rc * 9)) + (v_ry * 3)) + v_rx)];
        for (int v_xx_r = 0; v_xx_r < 2; ++v_xx_r) {
          acc_ptr[v_xx_r] = (acc_ptr[v_xx_r] + (pad_temp_0_fragment_ptr[v_xx_r] * x1_1_fragment_ptr[0]));
        }
      }
    }
  }
  for (int piece_1 = 0; piece_1 < 2; ++piece_1) {
    float condval_1;
    if (acc_ptr[piece_1] < 0.000000e+00f) {
      condval_1 = 0.000000e+00f;
    } else {
      condval_1 = acc_ptr[piece_1];
    }
    compute_intermediate_ptr[((((((((convert_int(get_group_id(0))) >> 2) * 512) + ((((convert_int(get_local_id(0))) & 31) >> 2) * 64)) + (((convert_int(get_group_id(0))) & 3) * 16)) + (((convert_int(get_local_id(0))) >> 5) * 8)) + (piece_1 * 4)) + ((convert_int(get_local_id(0))) & 3))] = condval_1;
  }
}

