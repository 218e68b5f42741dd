extern "C" __global__ void __launch_bounds__(128) main_kernel(half* __restrict__ W_ptr, half* __restrict__ X_ptr, float* __restrict__ conv2d_nhwc_ptr);
extern "C" __global__ void __launch_bounds__(128) main_kernel(half* __restrict__ W_ptr, half* __restrict__ X_ptr, float* __restrict__ conv2d_nhwc_ptr) {
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> C_fragment_ptr[1];
  __shared__ alignas(16) half A_shared_ptr[2560];
  __shared__ alignas(16) half B_shared_ptr[3072];
  alignas(16) half A_shared_ahead_ptr[8];
  alignas(16) half B_shared_ahead_ptr[8];
  nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, half, nvcuda::wmma::row_major> B_fragment_ptr[1];
  nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, half, nvcuda::wmma::row_major> A_fragment_ptr[1];
  extern __shared__ __align__(16) float C_shared_ptr[];
  nvcuda::wmma::fill_fragment(C_fragment_ptr[0], 0x0p+0f/*0.000000e+00*/);
  int cse_v1 = (((int)blockIdx.x) >> 1);
  int cse_v2 = (((int)blockIdx.x) & 1);
  int cse_v3 = (((int)threadIdx.x) >> 5);
  int cse_v4 = (((int)threadIdx.x) & 31);
  int cse_v5 = (((int)threadIdx.x) & 3);
  int cse_v12 = ((((int)threadIdx.x) & 7) >> 2);
  int cse_v13 = ((((int)threadIdx.x) & 31) >> 3);
  int cse_v14 = ((((int)threadIdx.x) & 31) >> 4);
  int cse_v15 = ((((int)threadIdx.x) >> 5) * 256);
  int cse_v16 = ((((int)threadIdx.x) & 3) * 8);
  int cse_v17 = ((((int)threadIdx.x) >> 5) * 320);
  int cse_v25 = (((((int)threadIdx.x) & 7) >> 2) * 128);
  int cse_v26 = (((((int)threadIdx.x) & 31) >> 3) * 32);
  int cse_v27 = (((((int)threadIdx.x) & 7) >> 2) * 160);
  int cse_v28 = (((((int)threadIdx.x) & 31) >> 3) * 40);
  int cse_v35 = min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)));
  int cse_v36 = ((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2))));
  int cse_v38 = (((((int)blockIdx.x) >> 1) * 16) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 8));
  int cse_v39 = (((((int)blockIdx.x) >> 1) * 2048) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 1024));
  int cse_v40 = (((((((int)blockIdx.x) >> 1) * 16) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 8)) + ((((int)threadIdx.x) >> 5) * 2)) + ((((int)threadIdx.x) & 7) >> 2));
  int cse_v42 = ((((((((int)blockIdx.x) >> 1) * 64) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) >> 5) * 8)) + (((((int)threadIdx.x) & 7) >> 2) * 4)) + ((((int)threadIdx.x) & 31) >> 3));
  int cse_v43 = (((((((((int)blockIdx.x) >> 1) * 64) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) >> 5) * 8)) + (((((int)threadIdx.x) & 7) >> 2) * 4)) + ((((int)threadIdx.x) & 31) >> 3)) % 14);
  uint4 condval;
  if (((((((((((int)blockIdx.x) >> 1) * 16) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 8)) + ((((int)threadIdx.x) >> 5) * 2)) + ((((int)threadIdx.x) & 7) >> 2)) < 49) && (14 <= ((((((((int)blockIdx.x) >> 1) * 64) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) >> 5) * 8)) + (((((int)threadIdx.x) & 7) >> 2) * 4)) + ((((int)threadIdx.x) & 31) >> 3)))) && (((((((((int)blockIdx.x) >> 1) * 32) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 16)) + ((((int)threadIdx.x) >> 5) * 4)) + (((((int)threadIdx.x) & 7) >> 2) * 2)) + ((((int)threadIdx.x) & 31) >> 4)) < 105)) && (1 <= (((((((((int)blockIdx.x) >> 1) * 64) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) >> 5) * 8)) + (((((int)threadIdx.x) & 7) >> 2) * 4)) + ((((int)threadIdx.x) & 31) >> 3)) % 14))) {
    condval = *(uint4*)(X_ptr + ((((((((((int)blockIdx.x) >> 1) * 2048) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 1024)) + ((((int)threadIdx.x) >> 5) * 256)) + (((((int)threadIdx.x) & 7) >> 2) * 128)) + (((((int)threadIdx.x) & 31) >> 3) * 32)) + ((((int)threadIdx.x) & 3) * 8)) - 480));
  } else {
    condval = make_uint4(__pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)));
  }
  *(uint4*)(A_shared_ptr + (((((((int)threadIdx.x) >> 5) * 320) + (((((int)threadIdx.x) & 7) >> 2) * 160)) + (((((int)threadIdx.x) & 31) >> 3) * 40)) + ((((int)threadIdx.x) & 3) * 8))) = condval;
  int cse_v6 = (((int)threadIdx.x) >> 4);
  int cse_v18 = ((((int)threadIdx.x) >> 4) * 128);
  int cse_v19 = ((((int)threadIdx.x) & 15) >> 3);
  int cse_v20 = ((((int)threadIdx.x) >> 4) * 192);
  int cse_v29 = (((((int)threadIdx.x) & 7) >> 2) * 64);
  int cse_v30 = (((((int)threadIdx.x) & 15) >> 3) * 32);
  int cse_v31 = (((((int)threadIdx.x) & 7) >> 2) * 96);
  int cse_v32 = (((((int)threadIdx.x) & 15) >> 3) * 48);
  int cse_v37 = (((((int)blockIdx.x) & 1) / min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32);
  *(uint4*)(B_shared_ptr + (((((((int)threadIdx.x) >> 4) * 192) + (((((int)threadIdx.x) & 7) >> 2) * 96)) + (((((int)threadIdx.x) & 15) >> 3) * 48)) + ((((int)threadIdx.x) & 3) * 8))) = *(uint4*)(W_ptr + ((((((((int)threadIdx.x) >> 4) * 128) + (((((int)threadIdx.x) & 7) >> 2) * 64)) + (((((int)threadIdx.x) & 15) >> 3) * 32)) + (((((int)blockIdx.x) & 1) / min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) & 3) * 8)));
  int cse_v10 = (((int)threadIdx.x) >> 6);
  int cse_v33 = (((((int)threadIdx.x) & 63) >> 5) * 16);
  #pragma unroll 1
  for (int k_outer = 0; k_outer < 9; ++k_outer) {
    __syncthreads();
    int cse_v7 = (k_outer + 1);
    if (k_outer < 8) {
      int cse_v21 = ((k_outer + 1) / 3);
      int cse_v22 = ((k_outer + 1) % 3);
      int cse_v44 = ((((((((((int)blockIdx.x) >> 1) * 64) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) >> 5) * 8)) + (((((int)threadIdx.x) & 7) >> 2) * 4)) + ((((int)threadIdx.x) & 31) >> 3)) / 14) + ((k_outer + 1) / 3));
      int cse_v45 = ((((((((((int)blockIdx.x) >> 1) * 64) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) >> 5) * 8)) + (((((int)threadIdx.x) & 7) >> 2) * 4)) + ((((int)threadIdx.x) & 31) >> 3)) % 14) + ((k_outer + 1) % 3));
      uint4 condval_1;
      if ((((((((((((int)blockIdx.x) >> 1) * 16) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 8)) + ((((int)threadIdx.x) >> 5) * 2)) + ((((int)threadIdx.x) & 7) >> 2)) < 49) && (1 <= ((((((((((int)blockIdx.x) >> 1) * 64) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) >> 5) * 8)) + (((((int)threadIdx.x) & 7) >> 2) * 4)) + ((((int)threadIdx.x) & 31) >> 3)) / 14) + ((k_outer + 1) / 3)))) && (((((((((((int)blockIdx.x) >> 1) * 64) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) >> 5) * 8)) + (((((int)threadIdx.x) & 7) >> 2) * 4)) + ((((int)threadIdx.x) & 31) >> 3)) / 14) + ((k_outer + 1) / 3)) < 15)) && (1 <= ((((((((((int)blockIdx.x) >> 1) * 64) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) >> 5) * 8)) + (((((int)threadIdx.x) & 7) >> 2) * 4)) + ((((int)threadIdx.x) & 31) >> 3)) % 14) + ((k_outer + 1) % 3)))) && (((((((((((int)blockIdx.x) >> 1) * 64) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) >> 5) * 8)) + (((((int)threadIdx.x) & 7) >> 2) * 4)) + ((((int)threadIdx.x) & 31) >> 3)) % 14) + ((k_outer + 1) % 3)) < 15)) {
        condval_1 = *(uint4*)(X_ptr + ((((((((((((int)blockIdx.x) >> 1) * 2048) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 1024)) + (((k_outer + 1) / 3) * 448)) + ((((int)threadIdx.x) >> 5) * 256)) + (((((int)threadIdx.x) & 7) >> 2) * 128)) + (((((int)threadIdx.x) & 31) >> 3) * 32)) + (((k_outer + 1) % 3) * 32)) + ((((int)threadIdx.x) & 3) * 8)) - 480));
      } else {
        condval_1 = make_uint4(__pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)));
      }
      *(uint4*)(A_shared_ahead_ptr + 0) = condval_1;
      *(uint4*)(B_shared_ahead_ptr + 0) = *(uint4*)(W_ptr + (((((((k_outer * 1024) + ((((int)threadIdx.x) >> 4) * 128)) + (((((int)threadIdx.x) & 7) >> 2) * 64)) + (((((int)threadIdx.x) & 15) >> 3) * 32)) + (((((int)blockIdx.x) & 1) / min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + ((((int)threadIdx.x) & 3) * 8)) + 1024));
    }
    for (int k_inner = 0; k_inner < 2; ++k_inner) {
      int cse_v8 = (k_outer & 1);
      int cse_v9 = (k_inner * 768);
      nvcuda::wmma::load_matrix_sync(B_fragment_ptr[0], (&(B_shared_ptr[((((k_outer & 1) * 1536) + (k_inner * 768)) + (((((int)threadIdx.x) & 63) >> 5) * 16))])), 48);
      int cse_v11 = (k_inner * 16);
      int cse_v23 = ((((int)threadIdx.x) >> 6) * 640);
      nvcuda::wmma::load_matrix_sync(A_fragment_ptr[0], (&(A_shared_ptr[((((k_outer & 1) * 1280) + ((((int)threadIdx.x) >> 6) * 640)) + (k_inner * 16))])), 40);
      nvcuda::wmma::mma_sync(C_fragment_ptr[0], A_fragment_ptr[0], B_fragment_ptr[0], C_fragment_ptr[0]);
    }
    if (k_outer < 8) {
      int cse_v24 = ((k_outer + 1) & 1);
      *(uint4*)(A_shared_ptr + (((((((k_outer + 1) & 1) * 1280) + ((((int)threadIdx.x) >> 5) * 320)) + (((((int)threadIdx.x) & 7) >> 2) * 160)) + (((((int)threadIdx.x) & 31) >> 3) * 40)) + ((((int)threadIdx.x) & 3) * 8))) = *(uint4*)(A_shared_ahead_ptr + 0);
      *(uint4*)(B_shared_ptr + (((((((k_outer + 1) & 1) * 1536) + ((((int)threadIdx.x) >> 4) * 192)) + (((((int)threadIdx.x) & 7) >> 2) * 96)) + (((((int)threadIdx.x) & 15) >> 3) * 48)) + ((((int)threadIdx.x) & 3) * 8))) = *(uint4*)(B_shared_ahead_ptr + 0);
    }
  }
  nvcuda::wmma::store_matrix_sync((&(C_shared_ptr[((((int)threadIdx.x) >> 5) * 256)])), C_fragment_ptr[0], 16, nvcuda::wmma::mem_row_major);
  int cse_v34 = (((((int)threadIdx.x) >> 5) * 256) + ((((int)threadIdx.x) & 31) * 4));
  int cse_v41 = (((((((int)blockIdx.x) >> 1) * 16) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 8)) + ((((int)threadIdx.x) >> 6) * 4)) + ((((int)threadIdx.x) & 31) >> 4));
  int cse_v46 = ((((((((((int)blockIdx.x) >> 1) * 2048) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 1024)) + ((((int)threadIdx.x) >> 6) * 512)) + (((((int)threadIdx.x) & 31) >> 2) * 32)) + (((((int)blockIdx.x) & 1) / min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + (((((int)threadIdx.x) & 63) >> 5) * 16)) + ((((int)threadIdx.x) & 3) * 4));
  __syncthreads();
  if ((((((((int)blockIdx.x) >> 1) * 16) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 8)) + ((((int)threadIdx.x) >> 6) * 4)) + ((((int)threadIdx.x) & 31) >> 4)) < 49) {
    *(float4*)(conv2d_nhwc_ptr + ((((((((((int)blockIdx.x) >> 1) * 2048) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 1024)) + ((((int)threadIdx.x) >> 6) * 512)) + (((((int)threadIdx.x) & 31) >> 2) * 32)) + (((((int)blockIdx.x) & 1) / min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + (((((int)threadIdx.x) & 63) >> 5) * 16)) + ((((int)threadIdx.x) & 3) * 4))) = *(float4*)(C_shared_ptr + (((((int)threadIdx.x) >> 5) * 256) + ((((int)threadIdx.x) & 31) * 4)));
  }
  if ((((((((int)blockIdx.x) >> 1) * 16) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 8)) + ((((int)threadIdx.x) >> 6) * 4)) + ((((int)threadIdx.x) & 31) >> 4)) < 47) {
    *(float4*)(conv2d_nhwc_ptr + (((((((((((int)blockIdx.x) >> 1) * 2048) + (((((int)blockIdx.x) & 1) % min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 1024)) + ((((int)threadIdx.x) >> 6) * 512)) + (((((int)threadIdx.x) & 31) >> 2) * 32)) + (((((int)blockIdx.x) & 1) / min(2, (7 - ((((int)blockIdx.x) >> 1) * 2)))) * 32)) + (((((int)threadIdx.x) & 63) >> 5) * 16)) + ((((int)threadIdx.x) & 3) * 4)) + 256)) = *(float4*)(C_shared_ptr + ((((((int)threadIdx.x) >> 5) * 256) + ((((int)threadIdx.x) & 31) * 4)) + 128));
  }
}

