// Function: main_kernel
__kernel void main_kernel(__global float* restrict W0_ptr, __global float* restrict W1_ptr, __global float* restrict X_ptr, __global float* restrict bias0_ptr, __global float* restrict bias1_ptr, __global float* restrict compute_ptr);
__kernel void main_kernel(__global float* restrict W0_ptr, __global float* restrict W1_ptr, __global float* restrict X_ptr, __global float* restrict bias0_ptr, __global float* restrict bias1_ptr, __global float* restrict compute_ptr) {
  float sums0_ptr[8];
  __local float4 A_shared_ptr[191];
  __local float4 B0_shared_ptr[8];
  float row_values0_ptr[4];
  float column_values0_ptr[8];
  float4 piece_ptr[1];
  float sums1_ptr[4];
  float row_values1_ptr[4];
  float column_values1_ptr[4];
  sums0_ptr[0] = 0.000000e+00f;
  sums0_ptr[1] = 0.000000e+00f;
  sums0_ptr[2] = 0.000000e+00f;
  sums0_ptr[3] = 0.000000e+00f;
  sums0_ptr[4] = 0.000000e+00f;
  sums0_ptr[5] = 0.000000e+00f;
  sums0_ptr[6] = 0.000000e+00f;
  sums0_ptr[7] = 0.000000e+00f;
  int cse_v1 = ((convert_int(get_local_id(0))) * 4);
  for (int k_outer = 0; k_outer < 3; ++k_outer) {
    float4 condval;
    if ((convert_int(get_local_id(0))) < 60) {
      condval = vload4(0, X_ptr + (((convert_int(get_local_id(0))) * 12) + (k_outer * 4)));
    } else {
      condval = ((float4)(0.000000e+00f, 0.000000e+00f, 0.000000e+00f, 0.000000e+00f));
    }
    A_shared_ptr[(convert_int(get_local_id(0)))] = condval;
    barrier(CLK_LOCAL_MEM_FENCE);
    if ((convert_int(get_local_id(0))) < 8) {
      B0_shared_ptr[(convert_int(get_local_id(0)))] = vload4(0, W0_ptr + ((k_outer * 32) + ((convert_int(get_local_id(0))) * 4)));
    }
    vstore4(A_shared_ptr[(convert_int(get_local_id(0)))], 0, row_values0_ptr + 0);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int u = 0; u < 4; ++u) {
      for (int j = 0; j < 2; ++j) {
        vstore4(B0_shared_ptr[((u * 2) + j)], 0, column_values0_ptr + (j * 4));
      }
      for (int j_1 = 0; j_1 < 2; ++j_1) {
        for (int v = 0; v < 4; ++v) {
          int cse_v3 = ((j_1 * 4) + v);
          sums0_ptr[((j_1 * 4) + v)] = (sums0_ptr[((j_1 * 4) + v)] + (row_values0_ptr[u] * column_values0_ptr[((j_1 * 4) + v)]));
        }
      }
    }
  }
  if ((convert_int(get_local_id(0))) < 60) {
    float4 t = (vload4(0, sums0_ptr + 0) + vload4(0, bias0_ptr + 0));
    piece_ptr[0] = select(t, ((float4)(0.000000e+00f, 0.000000e+00f, 0.000000e+00f, 0.000000e+00f)), (convert_int4((t < ((float4)(0.000000e+00f, 0.000000e+00f, 0.000000e+00f, 0.000000e+00f))))));
  } else {
    piece_ptr[0] = ((float4)(0.000000e+00f, 0.000000e+00f, 0.000000e+00f, 0.000000e+00f));
  }
  int cse_v2 = ((convert_int(get_local_id(0))) * 3);
  A_shared_ptr[((convert_int(get_local_id(0))) * 3)] = piece_ptr[0];
  if ((convert_int(get_local_id(0))) < 60) {
    float4 t_1 = (vload4(0, sums0_ptr + 4) + vload4(0, bias0_ptr + 4));
    piece_ptr[0] = select(t_1, ((float4)(0.000000e+00f, 0.000000e+00f, 0.000000e+00f, 0.000000e+00f)), (convert_int4((t_1 < ((float4)(0.000000e+00f, 0.000000e+00f, 0.000000e+00f, 0.000000e+00f))))));
  } else {
    piece_ptr[0] = ((float4)(0.000000e+00f, 0.000000e+00f, 0.000000e+00f, 0.000000e+00f));
  }
  A_shared_ptr[(((convert_int(get_local_id(0))) * 3) + 1)] = piece_ptr[0];
  sums1_ptr[0] = 0.000000e+00f;
  sums1_ptr[1] = 0.000000e+00f;
  sums1_ptr[2] = 0.000000e+00f;
  sums1_ptr[3] = 0.000000e+00f;
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 8) {
    B0_shared_ptr[(convert_int(get_local_id(0)))] = vload4(0, W1_ptr + ((convert_int(get_local_id(0))) * 4));
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int k_inner = 0; k_inner < 2; ++k_inner) {
    vstore4(A_shared_ptr[(((convert_int(get_local_id(0))) * 3) + k_inner)], 0, row_values1_ptr + 0);
    for (int u_1 = 0; u_1 < 4; ++u_1) {
      vstore4(B0_shared_ptr[((k_inner * 4) + u_1)], 0, column_values1_ptr + 0);
      for (int v_1 = 0; v_1 < 4; ++v_1) {
        sums1_ptr[v_1] = (sums1_ptr[v_1] + (row_values1_ptr[u_1] * column_values1_ptr[v_1]));
      }
    }
  }
  if ((convert_int(get_local_id(0))) < 60) {
    float4 t_2 = (vload4(0, sums1_ptr + 0) + vload4(0, bias1_ptr + 0));
    vstore4(select(t_2, ((float4)(0.000000e+00f, 0.000000e+00f, 0.000000e+00f, 0.000000e+00f)), (convert_int4((t_2 < ((float4)(0.000000e+00f, 0.000000e+00f, 0.000000e+00f, 0.000000e+00f)))))), 0, compute_ptr + ((convert_int(get_local_id(0))) * 4));
  }
}

