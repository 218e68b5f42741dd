extern "C" __global__ void __launch_bounds__(256) main_kernel(float* __restrict__ A_ptr, float* __restrict__ B_ptr, float* __restrict__ C_ptr);
extern "C" __global__ void __launch_bounds__(256) main_kernel(float* __restrict__ A_ptr, float* __restrict__ B_ptr, float* __restrict__ C_ptr) {
  alignas(16) float acc_ptr[2];
  __shared__ alignas(16) float A_0_shared_ptr[1070];
  __shared__ alignas(64) float B_1_shared_ptr[1024];
  alignas(16) float A_0_shared_ahead_ptr[2];
  alignas(16) float B_1_shared_ahead_ptr[2];
  alignas(16) float A_0_fragment_ptr[1];
  alignas(16) float B_1_fragment_ptr[2];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    acc_ptr[i] = 0x0p+0f/*0.000000e+00*/;
  }
  int cse_v1 = (((int)blockIdx.x) / 12);
  int cse_v2 = (((int)threadIdx.x) >> 5);
  int cse_v3 = (((int)threadIdx.x) & 31);
  int cse_v8 = ((((int)blockIdx.x) / 12) * 2);
  int cse_v9 = ((((int)threadIdx.x) & 31) * 2);
  int cse_v10 = ((((int)threadIdx.x) >> 5) * 66);
  int cse_v16 = (((((int)blockIdx.x) / 12) * 2) + (((int)threadIdx.x) >> 7));
  int cse_v17 = (((((int)blockIdx.x) / 12) * 2048) + ((((int)threadIdx.x) >> 5) * 256));
  float2 condval;
  if ((((((int)blockIdx.x) / 12) * 2) + (((int)threadIdx.x) >> 7)) < 15) {
    condval = *(float2*)(A_ptr + ((((((int)blockIdx.x) / 12) * 2048) + ((((int)threadIdx.x) >> 5) * 256)) + ((((int)threadIdx.x) & 31) * 2)));
  } else {
    condval = make_float2(0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/);
  }
  *(float2*)(A_0_shared_ptr + (((((int)threadIdx.x) >> 5) * 66) + ((((int)threadIdx.x) & 31) * 2))) = condval;
  int cse_v4 = (((int)blockIdx.x) % 12);
  int cse_v5 = (((int)threadIdx.x) & 3);
  int cse_v6 = (((int)threadIdx.x) * 2);
  int cse_v11 = ((((int)threadIdx.x) >> 2) * 92);
  int cse_v12 = ((((int)blockIdx.x) % 12) * 8);
  int cse_v13 = ((((int)threadIdx.x) & 3) * 2);
  int cse_v18 = (((((int)blockIdx.x) % 12) * 2) + ((((int)threadIdx.x) & 3) >> 1));
  float2 condval_1;
  if ((((((int)blockIdx.x) % 12) * 2) + ((((int)threadIdx.x) & 3) >> 1)) < 23) {
    condval_1 = *(float2*)(B_ptr + ((((((int)threadIdx.x) >> 2) * 92) + ((((int)blockIdx.x) % 12) * 8)) + ((((int)threadIdx.x) & 3) * 2)));
  } else {
    condval_1 = make_float2(0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/);
  }
  *(float2*)(B_1_shared_ptr + (((int)threadIdx.x) * 2)) = condval_1;
  for (int v_k_step = 0; v_k_step < 4; ++v_k_step) {
    __syncthreads();
    if (v_k_step < 3) {
      float2 condval_2;
      if ((((((int)blockIdx.x) / 12) * 2) + (((int)threadIdx.x) >> 7)) < 15) {
        condval_2 = *(float2*)(A_ptr + ((((((((int)blockIdx.x) / 12) * 2048) + ((((int)threadIdx.x) >> 5) * 256)) + (v_k_step * 64)) + ((((int)threadIdx.x) & 31) * 2)) + 64));
      } else {
        condval_2 = make_float2(0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/);
      }
      *(float2*)(A_0_shared_ahead_ptr + 0) = condval_2;
      float2 condval_3;
      if ((((((int)blockIdx.x) % 12) * 2) + ((((int)threadIdx.x) & 3) >> 1)) < 23) {
        condval_3 = *(float2*)(B_ptr + (((((v_k_step * 5888) + ((((int)threadIdx.x) >> 2) * 92)) + ((((int)blockIdx.x) % 12) * 8)) + ((((int)threadIdx.x) & 3) * 2)) + 5888));
      } else {
        condval_3 = make_float2(0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/);
      }
      *(float2*)(B_1_shared_ahead_ptr + 0) = condval_3;
    }
    #pragma unroll
    for (int v_k = 0; v_k < 8; ++v_k) {
      int cse_v7 = (v_k_step & 1);
      A_0_fragment_ptr[0] = A_0_shared_ptr[(((((v_k_step & 1) * 544) + (((((int)threadIdx.x) & 31) >> 2) * 66)) + (v_k * 8)) + (((int)threadIdx.x) >> 5))];
      *(float2*)(B_1_fragment_ptr + 0) = *(float2*)(B_1_shared_ptr + (((((v_k_step & 1) * 512) + (v_k * 64)) + ((((int)threadIdx.x) >> 5) * 8)) + ((((int)threadIdx.x) & 3) * 2)));
      #pragma unroll
      for (int v_j_r = 0; v_j_r < 2; ++v_j_r) {
        acc_ptr[v_j_r] = (acc_ptr[v_j_r] + (A_0_fragment_ptr[0] * B_1_fragment_ptr[v_j_r]));
      }
    }
    if (v_k_step < 3) {
      int cse_v14 = ((v_k_step + 1) & 1);
      *(float2*)(A_0_shared_ptr + (((((v_k_step + 1) & 1) * 544) + ((((int)threadIdx.x) >> 5) * 66)) + ((((int)threadIdx.x) & 31) * 2))) = *(float2*)(A_0_shared_ahead_ptr + 0);
      *(float2*)(B_1_shared_ptr + ((((v_k_step + 1) & 1) * 512) + (((int)threadIdx.x) * 2))) = *(float2*)(B_1_shared_ahead_ptr + 0);
    }
  }
  int cse_v15 = ((((int)threadIdx.x) >> 5) * 64);
  __syncthreads();
  if (128 <= ((int)threadIdx.x)) {
    #pragma unroll
    for (int i_1 = 0; i_1 < 2; ++i_1) {
      B_1_shared_ptr[(((((((int)threadIdx.x) >> 5) * 64) + (i_1 * 32)) + (((int)threadIdx.x) & 31)) - 256)] = acc_ptr[i_1];
    }
  }
  __syncthreads();
  if (((int)threadIdx.x) < 128) {
    #pragma unroll
    for (int i_2 = 0; i_2 < 2; ++i_2) {
      acc_ptr[i_2] = (acc_ptr[i_2] + B_1_shared_ptr[((((((int)threadIdx.x) >> 5) * 64) + (i_2 * 32)) + (((int)threadIdx.x) & 31))]);
    }
  }
  __syncthreads();
  if ((64 <= ((int)threadIdx.x)) && (((int)threadIdx.x) < 128)) {
    #pragma unroll
    for (int i_3 = 0; i_3 < 2; ++i_3) {
      B_1_shared_ptr[(((((((int)threadIdx.x) >> 5) * 64) + (i_3 * 32)) + (((int)threadIdx.x) & 31)) - 128)] = acc_ptr[i_3];
    }
  }
  __syncthreads();
  if (((int)threadIdx.x) < 64) {
    #pragma unroll
    for (int i_4 = 0; i_4 < 2; ++i_4) {
      acc_ptr[i_4] = (acc_ptr[i_4] + B_1_shared_ptr[((((((int)threadIdx.x) >> 5) * 64) + (i_4 * 32)) + (((int)threadIdx.x) & 31))]);
    }
  }
  __syncthreads();
  if ((32 <= ((int)threadIdx.x)) && (((int)threadIdx.x) < 64)) {
    #pragma unroll
    for (int i_5 = 0; i_5 < 2; ++i_5) {
      B_1_shared_ptr[(((i_5 * 32) + ((int)threadIdx.x)) - 32)] = acc_ptr[i_5];
    }
  }
  __syncthreads();
  if (((int)threadIdx.x) < 32) {
    #pragma unroll
    for (int i_6 = 0; i_6 < 2; ++i_6) {
      acc_ptr[i_6] = (acc_ptr[i_6] + B_1_shared_ptr[((i_6 * 32) + ((int)threadIdx.x))]);
    }
  }
  if (((int)threadIdx.x) < 32) {
    if (((((((int)blockIdx.x) / 12) * 2) + (((int)threadIdx.x) >> 4)) < 15) && ((((((int)blockIdx.x) % 12) * 2) + ((((int)threadIdx.x) & 3) >> 1)) < 23)) {
      *(float2*)(C_ptr + (((((((int)blockIdx.x) / 12) * 736) + ((((int)threadIdx.x) >> 2) * 92)) + ((((int)blockIdx.x) % 12) * 8)) + ((((int)threadIdx.x) & 3) * 2))) = *(float2*)(acc_ptr + 0);
    }
  }
}

