extern "C" __global__ void __launch_bounds__(256, 3) main_kernel(half* __restrict__ A_ptr, half* __restrict__ B_ptr, float* __restrict__ C_ptr);
extern "C" __global__ void __launch_bounds__(256, 3) main_kernel(half* __restrict__ A_ptr, half* __restrict__ B_ptr, float* __restrict__ C_ptr) {
  alignas(16) float C_fragment_ptr[8];
  __shared__ alignas(16) half A_shared_ptr[5120];
  __shared__ alignas(16) half B_shared_ptr[10240];
  alignas(16) half A_fragment_ptr[16];
  alignas(16) half B_fragment_ptr[16];
  alignas(16) half A_fragment_applied_ptr[8];
  C_fragment_ptr[0] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[1] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[2] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[3] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[4] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[5] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[6] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[7] = 0x0p+0f/*0.000000e+00*/;
  int cse_v1 = (((int)threadIdx.x) >> 2);
  int cse_v2 = (((int)threadIdx.x) >> 3);
  int cse_v3 = (((int)threadIdx.x) & 3);
  int cse_v5 = (((int)threadIdx.x) * 8);
  int cse_v13 = ((((int)threadIdx.x) & 3) * 8);
  int cse_v19 = ((((int)blockIdx.x) * 5120) + ((((int)threadIdx.x) >> 2) * 160));
  int cse_v23 = (((((int)threadIdx.x) >> 2) * 32) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 3)) & 3) * 8));
  int cse_v24 = (((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8));
  for (int k_outer_prologue = 0; k_outer_prologue < 4; ++k_outer_prologue) {
    if (((int)threadIdx.x) < 128) {
      ptx_cp_async_legacy_cg_16_2_2((&(A_shared_ptr[(k_outer_prologue * 1024)])), (((((int)threadIdx.x) >> 2) * 32) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 3)) & 3) * 8)), A_ptr, ((((((int)blockIdx.x) * 5120) + ((((int)threadIdx.x) >> 2) * 160)) + (k_outer_prologue * 32)) + ((((int)threadIdx.x) & 3) * 8)));
    }
    int cse_v4 = (k_outer_prologue * 2048);
    ptx_cp_async_legacy_cg_16_2_2((&(B_shared_ptr[(k_outer_prologue * 2048)])), (((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)), B_ptr, ((k_outer_prologue * 2048) + (((int)threadIdx.x) * 8)));
    tvm_builtin_ptx_cp_async_commit_group_async_commit_group();
  }
  tvm_builtin_ptx_cp_async_wait_group_async_wait_group_3();
  __syncthreads();
  int cse_v6 = (((int)threadIdx.x) >> 7);
  int cse_v7 = (((int)threadIdx.x) & 15);
  int cse_v8 = (((int)threadIdx.x) & 31);
  int cse_v14 = ((((int)threadIdx.x) & 31) >> 4);
  int cse_v15 = ((((int)threadIdx.x) & 15) >> 1);
  int cse_v20 = (((((int)threadIdx.x) >> 7) * 512) + ((((int)threadIdx.x) & 15) * 32));

  {
    unsigned int addr = __cvta_generic_to_shared((&(A_shared_ptr[0])) + ((((((int)threadIdx.x) >> 7) * 512) + ((((int)threadIdx.x) & 15) * 32)) + (((((((int)threadIdx.x) & 31) >> 4) + ((((int)threadIdx.x) & 15) >> 1)) & 3) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(A_fragment_ptr + 0))[0]), "=r"(((unsigned *)(A_fragment_ptr + 0))[1]), "=r"(((unsigned *)(A_fragment_ptr + 0))[2]), "=r"(((unsigned *)(A_fragment_ptr + 0))[3])
      : "r"(addr)
    );
  }
  int cse_v9 = (((int)threadIdx.x) & 127);
  int cse_v16 = ((((int)threadIdx.x) & 15) * 64);
  int cse_v25 = (((((((int)threadIdx.x) & 127) >> 4) + (((int)threadIdx.x) & 15)) & 7) * 8);

  {
    unsigned int addr = __cvta_generic_to_shared((&(B_shared_ptr[0])) + (((((int)threadIdx.x) & 15) * 64) + (((((((int)threadIdx.x) & 127) >> 4) + (((int)threadIdx.x) & 15)) & 7) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(B_fragment_ptr + 0))[0]), "=r"(((unsigned *)(B_fragment_ptr + 0))[1]), "=r"(((unsigned *)(B_fragment_ptr + 0))[2]), "=r"(((unsigned *)(B_fragment_ptr + 0))[3])
      : "r"(addr)
    );
  }
  for (int k_outer = 0; k_outer < 5; ++k_outer) {
    if (k_outer < 1) {
      if (((int)threadIdx.x) < 128) {
        ptx_cp_async_legacy_cg_16_2_2((&(A_shared_ptr[4096])), (((((int)threadIdx.x) >> 2) * 32) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 3)) & 3) * 8)), A_ptr, ((((((int)blockIdx.x) * 5120) + ((((int)threadIdx.x) >> 2) * 160)) + ((((int)threadIdx.x) & 3) * 8)) + 128));
      }
      ptx_cp_async_legacy_cg_16_2_2((&(B_shared_ptr[8192])), (((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)), B_ptr, ((((int)threadIdx.x) * 8) + 8192));
    }
    tvm_builtin_ptx_cp_async_commit_group_async_commit_group();
    #pragma unroll
    for (int k_inner = 0; k_inner < 2; ++k_inner) {
      int cse_v10 = (k_inner + 1);
      int cse_v17 = ((k_inner + 1) & 1);
      if (((k_inner + 1) % 2) == 0) {
        tvm_builtin_ptx_cp_async_wait_group_async_wait_group_3();
        __syncthreads();
      }
      int cse_v21 = (((k_inner + 1) & 1) * 8);
      int cse_v22 = ((((k_inner + 1) >> 1) + k_outer) % 5);

  {
    unsigned int addr = __cvta_generic_to_shared((&(A_shared_ptr[(((((k_inner + 1) >> 1) + k_outer) % 5) * 1024)])) + ((((((int)threadIdx.x) >> 7) * 512) + ((((int)threadIdx.x) & 15) * 32)) + (((((((k_inner + 1) & 1) * 2) + ((((int)threadIdx.x) & 31) >> 4)) + ((((int)threadIdx.x) & 15) >> 1)) & 3) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(A_fragment_ptr + (((k_inner + 1) & 1) * 8)))[0]), "=r"(((unsigned *)(A_fragment_ptr + (((k_inner + 1) & 1) * 8)))[1]), "=r"(((unsigned *)(A_fragment_ptr + (((k_inner + 1) & 1) * 8)))[2]), "=r"(((unsigned *)(A_fragment_ptr + (((k_inner + 1) & 1) * 8)))[3])
      : "r"(addr)
    );
  }

  {
    unsigned int addr = __cvta_generic_to_shared((&(B_shared_ptr[(((((k_inner + 1) >> 1) + k_outer) % 5) * 2048)])) + (((((k_inner + 1) & 1) * 1024) + ((((int)threadIdx.x) & 15) * 64)) + (((((((int)threadIdx.x) & 127) >> 4) + (((int)threadIdx.x) & 15)) & 7) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(B_fragment_ptr + (((k_inner + 1) & 1) * 8)))[0]), "=r"(((unsigned *)(B_fragment_ptr + (((k_inner + 1) & 1) * 8)))[1]), "=r"(((unsigned *)(B_fragment_ptr + (((k_inner + 1) & 1) * 8)))[2]), "=r"(((unsigned *)(B_fragment_ptr + (((k_inner + 1) & 1) * 8)))[3])
      : "r"(addr)
    );
  }
      int cse_v11 = (k_inner * 8);
      #pragma unroll
      for (int e = 0; e < 8; ++e) {
        int cse_v18 = ((k_inner * 8) + e);
        half condval;
        if (A_fragment_ptr[((k_inner * 8) + e)] < __float2half_rn(0x0p+0f/*0.000000e+00*/)) {
          condval = __float2half_rn(0x0p+0f/*0.000000e+00*/);
        } else {
          condval = A_fragment_ptr[((k_inner * 8) + e)];
        }
        A_fragment_applied_ptr[e] = condval;
      }
      #pragma unroll
      for (int j = 0; j < 2; ++j) {
        int cse_v12 = (j * 4);

  {
    __asm__ __volatile__(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
      :  "=f"(((float *)(C_fragment_ptr + (j * 4)))[0]), "=f"(((float *)(C_fragment_ptr + (j * 4)))[1]), "=f"(((float *)(C_fragment_ptr + (j * 4)))[2]), "=f"(((float *)(C_fragment_ptr + (j * 4)))[3])
      : "r"(((unsigned *)(A_fragment_applied_ptr + 0))[0]), "r"(((unsigned *)(A_fragment_applied_ptr + 0))[1]), "r"(((unsigned *)(A_fragment_applied_ptr + 0))[2]), "r"(((unsigned *)(A_fragment_applied_ptr + 0))[3]), "r"(((unsigned *)(B_fragment_ptr + ((k_inner * 8) + (j * 4))))[0]), "r"(((unsigned *)(B_fragment_ptr + ((k_inner * 8) + (j * 4))))[1]), "f"(((float *)(C_fragment_ptr + (j * 4)))[0]), "f"(((float *)(C_fragment_ptr + (j * 4)))[1]), "f"(((float *)(C_fragment_ptr + (j * 4)))[2]), "f"(((float *)(C_fragment_ptr + (j * 4)))[3]));
  }
      }
    }
  }
  int cse_v26 = (((((((int)blockIdx.x) * 2048) + ((((int)threadIdx.x) >> 7) * 1024)) + (((((int)threadIdx.x) & 31) >> 2) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 3) * 2));
  *(float2*)(C_ptr + (((((((int)blockIdx.x) * 2048) + ((((int)threadIdx.x) >> 7) * 1024)) + (((((int)threadIdx.x) & 31) >> 2) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 3) * 2))) = *(float2*)(C_fragment_ptr + 0);
  *(float2*)(C_ptr + ((((((((int)blockIdx.x) * 2048) + ((((int)threadIdx.x) >> 7) * 1024)) + (((((int)threadIdx.x) & 31) >> 2) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 3) * 2)) + 8)) = *(float2*)(C_fragment_ptr + 4);
  *(float2*)(C_ptr + ((((((((int)blockIdx.x) * 2048) + ((((int)threadIdx.x) >> 7) * 1024)) + (((((int)threadIdx.x) & 31) >> 2) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 3) * 2)) + 512)) = *(float2*)(C_fragment_ptr + 2);
  *(float2*)(C_ptr + ((((((((int)blockIdx.x) * 2048) + ((((int)threadIdx.x) >> 7) * 1024)) + (((((int)threadIdx.x) & 31) >> 2) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 3) * 2)) + 520)) = *(float2*)(C_fragment_ptr + 6);
}

