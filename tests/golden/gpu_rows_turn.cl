// Function: main_kernel
__kernel void main_kernel(__global float* restrict T_transpose_ptr, __global float* restrict x0_ptr);
__kernel void main_kernel(__global float* restrict T_transpose_ptr, __global float* restrict x0_ptr) {
  __local float tile_ptr[1056];
  int cse_v1 = ((convert_int(get_group_id(0))) % 3);
  int cse_v2 = ((convert_int(get_local_id(1))) >> 1);
  int cse_v3 = ((convert_int(get_group_id(0))) / 3);
  int cse_v4 = ((convert_int(get_local_id(0))) >> 1);
  int cse_v5 = (((convert_int(get_group_id(0))) % 3) * 16);
  int cse_v6 = (((convert_int(get_group_id(0))) / 3) * 16);
  int cse_v7 = (((convert_int(get_local_id(1))) * 33) + (convert_int(get_local_id(0))));
  int cse_v9 = ((((convert_int(get_group_id(0))) % 3) * 16) + ((convert_int(get_local_id(1))) >> 1));
  int cse_v10 = ((((convert_int(get_group_id(0))) / 3) * 16) + ((convert_int(get_local_id(0))) >> 1));
  int cse_v12 = ((((((convert_int(get_group_id(0))) % 3) * 2880) + ((convert_int(get_local_id(1))) * 90)) + (((convert_int(get_group_id(0))) / 3) * 32)) + (convert_int(get_local_id(0))));
  if (((((convert_int(get_group_id(0))) % 3) * 16) + ((convert_int(get_local_id(1))) >> 1)) < 35) {
    if (((((convert_int(get_group_id(0))) / 3) * 16) + ((convert_int(get_local_id(0))) >> 1)) < 45) {
      tile_ptr[(((convert_int(get_local_id(1))) * 33) + (convert_int(get_local_id(0))))] = x0_ptr[((((((convert_int(get_group_id(0))) % 3) * 2880) + ((convert_int(get_local_id(1))) * 90)) + (((convert_int(get_group_id(0))) / 3) * 32)) + (convert_int(get_local_id(0))))];
    }
  }
  if (((((convert_int(get_group_id(0))) % 3) * 16) + ((convert_int(get_local_id(1))) >> 1)) < 31) {
    if (((((convert_int(get_group_id(0))) / 3) * 16) + ((convert_int(get_local_id(0))) >> 1)) < 45) {
      tile_ptr[((((convert_int(get_local_id(1))) * 33) + (convert_int(get_local_id(0)))) + 264)] = x0_ptr[(((((((convert_int(get_group_id(0))) % 3) * 2880) + ((convert_int(get_local_id(1))) * 90)) + (((convert_int(get_group_id(0))) / 3) * 32)) + (convert_int(get_local_id(0)))) + 720)];
    }
  }
  if (((((convert_int(get_group_id(0))) % 3) * 16) + ((convert_int(get_local_id(1))) >> 1)) < 27) {
    if (((((convert_int(get_group_id(0))) / 3) * 16) + ((convert_int(get_local_id(0))) >> 1)) < 45) {
      tile_ptr[((((convert_int(get_local_id(1))) * 33) + (convert_int(get_local_id(0)))) + 528)] = x0_ptr[(((((((convert_int(get_group_id(0))) % 3) * 2880) + ((convert_int(get_local_id(1))) * 90)) + (((convert_int(get_group_id(0))) / 3) * 32)) + (convert_int(get_local_id(0)))) + 1440)];
    }
  }
  if (((((convert_int(get_group_id(0))) % 3) * 16) + ((convert_int(get_local_id(1))) >> 1)) < 23) {
    if (((((convert_int(get_group_id(0))) / 3) * 16) + ((convert_int(get_local_id(0))) >> 1)) < 45) {
      tile_ptr[((((convert_int(get_local_id(1))) * 33) + (convert_int(get_local_id(0)))) + 792)] = x0_ptr[(((((((convert_int(get_group_id(0))) % 3) * 2880) + ((convert_int(get_local_id(1))) * 90)) + (((convert_int(get_group_id(0))) / 3) * 32)) + (convert_int(get_local_id(0)))) + 2160)];
    }
  }
  int cse_v8 = (((convert_int(get_local_id(0))) * 33) + (convert_int(get_local_id(1))));
  int cse_v11 = ((((convert_int(get_group_id(0))) % 3) * 16) + ((convert_int(get_local_id(0))) >> 1));
  int cse_v13 = ((((((convert_int(get_group_id(0))) / 3) * 2240) + ((convert_int(get_local_id(1))) * 70)) + (((convert_int(get_group_id(0))) % 3) * 32)) + (convert_int(get_local_id(0))));
  barrier(CLK_LOCAL_MEM_FENCE);
  if (((((convert_int(get_group_id(0))) % 3) * 16) + ((convert_int(get_local_id(0))) >> 1)) < 35) {
    T_transpose_ptr[((((((convert_int(get_group_id(0))) / 3) * 2240) + ((convert_int(get_local_id(1))) * 70)) + (((convert_int(get_group_id(0))) % 3) * 32)) + (convert_int(get_local_id(0))))] = tile_ptr[(((convert_int(get_local_id(0))) * 33) + (convert_int(get_local_id(1))))];
  }
  if (((((convert_int(get_group_id(0))) % 3) * 16) + ((convert_int(get_local_id(0))) >> 1)) < 35) {
    T_transpose_ptr[(((((((convert_int(get_group_id(0))) / 3) * 2240) + ((convert_int(get_local_id(1))) * 70)) + (((convert_int(get_group_id(0))) % 3) * 32)) + (convert_int(get_local_id(0)))) + 560)] = tile_ptr[((((convert_int(get_local_id(0))) * 33) + (convert_int(get_local_id(1)))) + 8)];
  }
  if (((((convert_int(get_group_id(0))) % 3) * 16) + ((convert_int(get_local_id(0))) >> 1)) < 35) {
    T_transpose_ptr[(((((((convert_int(get_group_id(0))) / 3) * 2240) + ((convert_int(get_local_id(1))) * 70)) + (((convert_int(get_group_id(0))) % 3) * 32)) + (convert_int(get_local_id(0)))) + 1120)] = tile_ptr[((((convert_int(get_local_id(0))) * 33) + (convert_int(get_local_id(1)))) + 16)];
  }
  if (((((convert_int(get_group_id(0))) % 3) * 16) + ((convert_int(get_local_id(0))) >> 1)) < 35) {
    if (((((convert_int(get_group_id(0))) / 3) * 16) + ((convert_int(get_local_id(1))) >> 1)) < 33) {
      T_transpose_ptr[(((((((convert_int(get_group_id(0))) / 3) * 2240) + ((convert_int(get_local_id(1))) * 70)) + (((convert_int(get_group_id(0))) % 3) * 32)) + (convert_int(get_local_id(0)))) + 1680)] = tile_ptr[((((convert_int(get_local_id(0))) * 33) + (convert_int(get_local_id(1)))) + 24)];
    }
  }
}

