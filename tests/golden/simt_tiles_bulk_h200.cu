extern "C" __global__ void __launch_bounds__(32) main_kernel(float* __restrict__ A_ptr, float* __restrict__ B_ptr, float* __restrict__ C_ptr);
extern "C" __global__ void __launch_bounds__(32) main_kernel(float* __restrict__ A_ptr, float* __restrict__ B_ptr, float* __restrict__ C_ptr) {
  alignas(16) float acc_ptr[1];
  __shared__ alignas(8) uint64_t landed_0_8_ptr[8];
  __shared__ alignas(16) float A_0_shared_ptr[256];
  __shared__ alignas(16) float B_1_shared_ptr[512];
  alignas(16) float A_0_fragment_ptr[4];
  alignas(16) float B_1_fragment_ptr[4];
  acc_ptr[0] = 0x0p+0f/*0.000000e+00*/;
  if (((int)threadIdx.x) == 0) {
    tvm_builtin_ptx_mbarrier_init_init_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[0]))), (uint)2);
    tvm_builtin_ptx_mbarrier_init_init_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[1]))), (uint)2);
    tvm_builtin_ptx_mbarrier_init_init_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[2]))), (uint)2);
    tvm_builtin_ptx_mbarrier_init_init_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[3]))), (uint)2);
    tvm_builtin_ptx_mbarrier_init_init_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[4]))), (uint)2);
    tvm_builtin_ptx_mbarrier_init_init_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[5]))), (uint)2);
    tvm_builtin_ptx_mbarrier_init_init_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[6]))), (uint)2);
    tvm_builtin_ptx_mbarrier_init_init_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[7]))), (uint)2);
    tvm_builtin_ptx_fence_mbarrier_init_mbarrier_init_release_cluster();
  }
  __syncthreads();
  int cse_v1 = (((int)threadIdx.x) * 8);
  int cse_v2 = (((int)blockIdx.x) >> 3);
  int cse_v3 = (((int)threadIdx.x) * 64);
  int cse_v9 = ((((int)blockIdx.x) & 7) * 8);
  int cse_v14 = (((((int)blockIdx.x) >> 3) * 288) + (((int)threadIdx.x) * 72));
  for (int v_k_step_prologue = 0; v_k_step_prologue < 7; ++v_k_step_prologue) {
    if (((int)threadIdx.x) == 0) {
      tvm_builtin_ptx_mbarrier_arrive_expect_tx_arrive_expect_tx_release_cta_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[v_k_step_prologue]))), (uint)128);
    }
    if (((int)threadIdx.x) < 4) {
      tvm_builtin_ptx_cp_async_bulk_g2s_cluster_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(tvm_builtin_cuda_cvta_generic_to_shared((&(A_0_shared_ptr[((v_k_step_prologue * 32) + (((int)threadIdx.x) * 8))]))), (&(A_ptr[((((((int)blockIdx.x) >> 3) * 288) + (((int)threadIdx.x) * 72)) + (v_k_step_prologue * 8))])), (uint)32, tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[v_k_step_prologue]))));
    }
    if (((int)threadIdx.x) == 0) {
      tvm_builtin_ptx_mbarrier_arrive_expect_tx_arrive_expect_tx_release_cta_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[v_k_step_prologue]))), (uint)256);
    }
    if (((int)threadIdx.x) < 8) {
      tvm_builtin_ptx_cp_async_bulk_g2s_cluster_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(tvm_builtin_cuda_cvta_generic_to_shared((&(B_1_shared_ptr[((v_k_step_prologue * 64) + (((int)threadIdx.x) * 8))]))), (&(B_ptr[(((v_k_step_prologue * 512) + (((int)threadIdx.x) * 64)) + ((((int)blockIdx.x) & 7) * 8))])), (uint)32, tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[v_k_step_prologue]))));
    }
  }
  tvm_builtin_cuda_mbarrier_wait((&(landed_0_8_ptr[0])), 0);
  int cse_v4 = (((int)threadIdx.x) >> 3);
  int cse_v5 = (((int)threadIdx.x) & 7);
  int cse_v10 = ((((int)threadIdx.x) >> 3) * 8);
  #pragma unroll
  for (int v_k_prologue = 0; v_k_prologue < 3; ++v_k_prologue) {
    A_0_fragment_ptr[v_k_prologue] = A_0_shared_ptr[(((((int)threadIdx.x) >> 3) * 8) + v_k_prologue)];
    B_1_fragment_ptr[v_k_prologue] = B_1_shared_ptr[((v_k_prologue * 8) + (((int)threadIdx.x) & 7))];
  }
  for (int v_k_step = 0; v_k_step < 9; ++v_k_step) {
    if (v_k_step < 2) {
      int cse_v11 = ((v_k_step + 7) & 7);
      if (((int)threadIdx.x) == 0) {
        tvm_builtin_ptx_mbarrier_arrive_expect_tx_arrive_expect_tx_release_cta_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[((v_k_step + 7) & 7)]))), (uint)128);
      }
      if (((int)threadIdx.x) < 4) {
        tvm_builtin_ptx_cp_async_bulk_g2s_cluster_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(tvm_builtin_cuda_cvta_generic_to_shared((&(A_0_shared_ptr[((((v_k_step + 7) & 7) * 32) + (((int)threadIdx.x) * 8))]))), (&(A_ptr[(((((((int)blockIdx.x) >> 3) * 288) + (((int)threadIdx.x) * 72)) + (v_k_step * 8)) + 56)])), (uint)32, tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[((v_k_step + 7) & 7)]))));
      }
      if (((int)threadIdx.x) == 0) {
        tvm_builtin_ptx_mbarrier_arrive_expect_tx_arrive_expect_tx_release_cta_shared__cta_b64(tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[((v_k_step + 7) & 7)]))), (uint)256);
      }
      if (((int)threadIdx.x) < 8) {
        tvm_builtin_ptx_cp_async_bulk_g2s_cluster_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(tvm_builtin_cuda_cvta_generic_to_shared((&(B_1_shared_ptr[((((v_k_step + 7) & 7) * 64) + (((int)threadIdx.x) * 8))]))), (&(B_ptr[((((v_k_step * 512) + (((int)threadIdx.x) * 64)) + ((((int)blockIdx.x) & 7) * 8)) + 3584)])), (uint)32, tvm_builtin_cuda_cvta_generic_to_shared((&(landed_0_8_ptr[((v_k_step + 7) & 7)]))));
      }
    }
    #pragma unroll
    for (int v_k = 0; v_k < 8; ++v_k) {
      int cse_v6 = (v_k + 3);
      int cse_v12 = ((v_k + 3) & 7);
      if (((v_k + 3) % 8) == 0) {
        if (v_k_step < 8) {
          int cse_v7 = (v_k_step + 1);
          tvm_builtin_cuda_mbarrier_wait((&(landed_0_8_ptr[((v_k_step + 1) & 7)])), ((v_k_step + 1) >> 3));
        }
        __syncthreads();
      }
      int cse_v13 = ((v_k + 3) & 3);
      int cse_v15 = ((((v_k + 3) >> 3) + v_k_step) & 7);
      A_0_fragment_ptr[((v_k + 3) & 3)] = A_0_shared_ptr[(((((((v_k + 3) >> 3) + v_k_step) & 7) * 32) + ((((int)threadIdx.x) >> 3) * 8)) + ((v_k + 3) & 7))];
      B_1_fragment_ptr[((v_k + 3) & 3)] = B_1_shared_ptr[(((((((v_k + 3) >> 3) + v_k_step) & 7) * 64) + (((v_k + 3) & 7) * 8)) + (((int)threadIdx.x) & 7))];
      int cse_v8 = (v_k & 3);
      acc_ptr[0] = (acc_ptr[0] + (A_0_fragment_ptr[(v_k & 3)] * B_1_fragment_ptr[(v_k & 3)]));
    }
  }
  C_ptr[(((((((int)blockIdx.x) >> 3) * 256) + ((((int)threadIdx.x) >> 3) * 64)) + ((((int)blockIdx.x) & 7) * 8)) + (((int)threadIdx.x) & 7))] = acc_ptr[0];
}

