extern "C" __global__ void __launch_bounds__(256, 3) main_kernel(half* __restrict__ A_ptr, half* __restrict__ B_ptr, half* __restrict__ C_ptr, half* __restrict__ bias_ptr, half* __restrict__ residual_ptr);
extern "C" __global__ void __launch_bounds__(256, 3) main_kernel(half* __restrict__ A_ptr, half* __restrict__ B_ptr, half* __restrict__ C_ptr, half* __restrict__ bias_ptr, half* __restrict__ residual_ptr) {
  alignas(16) float C_fragment_ptr[8];
  __shared__ alignas(16) half A_shared_ptr[6144];
  __shared__ alignas(16) half B_shared_ptr[12288];
  alignas(16) half A_fragment_ptr[16];
  alignas(16) half B_fragment_ptr[16];
  alignas(16) float taken_ptr[1];
  alignas(16) float piece_ptr[4];
  alignas(16) float taken_ptr_1[1];
  alignas(16) half input_ptr[4];
  alignas(16) half input_ptr_1[4];
  C_fragment_ptr[0] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[1] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[2] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[3] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[4] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[5] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[6] = 0x0p+0f/*0.000000e+00*/;
  C_fragment_ptr[7] = 0x0p+0f/*0.000000e+00*/;
  int cse_v1 = (((int)threadIdx.x) >> 3);
  int cse_v2 = (((int)threadIdx.x) & 7);
  int cse_v3 = (((int)blockIdx.x) >> 2);
  int cse_v4 = (((int)blockIdx.x) & 1);
  int cse_v13 = ((((int)threadIdx.x) & 7) * 8);
  int cse_v14 = ((((int)threadIdx.x) >> 3) * 128);
  int cse_v21 = (((((int)blockIdx.x) & 3) >> 1) * 64);
  int cse_v27 = ((((((int)blockIdx.x) >> 2) * 16384) + ((((int)blockIdx.x) & 1) * 8192)) + ((((int)threadIdx.x) >> 3) * 256));
  int cse_v29 = (((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8));
  int cse_v33 = ((((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)) + 2048);
  for (int k_outer_prologue = 0; k_outer_prologue < 2; ++k_outer_prologue) {
    ptx_cp_async_legacy_cg_16_2_2((&(A_shared_ptr[(k_outer_prologue * 2048)])), (((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)), A_ptr, ((((((((int)blockIdx.x) >> 2) * 16384) + ((((int)blockIdx.x) & 1) * 8192)) + ((((int)threadIdx.x) >> 3) * 256)) + (k_outer_prologue * 64)) + ((((int)threadIdx.x) & 7) * 8)));
    int cse_v5 = (k_outer_prologue * 4096);
    int cse_v30 = ((((k_outer_prologue * 8192) + ((((int)threadIdx.x) >> 3) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + ((((int)threadIdx.x) & 7) * 8));
    ptx_cp_async_legacy_cg_16_2_2((&(B_shared_ptr[(k_outer_prologue * 4096)])), (((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)), B_ptr, ((((k_outer_prologue * 8192) + ((((int)threadIdx.x) >> 3) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + ((((int)threadIdx.x) & 7) * 8)));
    ptx_cp_async_legacy_cg_16_2_2((&(B_shared_ptr[(k_outer_prologue * 4096)])), ((((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)) + 2048), B_ptr, (((((k_outer_prologue * 8192) + ((((int)threadIdx.x) >> 3) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + ((((int)threadIdx.x) & 7) * 8)) + 4096));
    tvm_builtin_ptx_cp_async_commit_group_async_commit_group();
  }
  tvm_builtin_ptx_cp_async_wait_group_async_wait_group_1();
  __syncthreads();
  int cse_v6 = (((int)threadIdx.x) >> 7);
  int cse_v7 = (((int)threadIdx.x) & 15);
  int cse_v8 = (((int)threadIdx.x) & 31);
  int cse_v15 = ((((int)threadIdx.x) & 15) * 64);
  int cse_v16 = ((((int)threadIdx.x) & 31) >> 4);
  int cse_v22 = (((((int)threadIdx.x) >> 7) * 1024) + ((((int)threadIdx.x) & 15) * 64));

  {
    unsigned int addr = __cvta_generic_to_shared((&(A_shared_ptr[0])) + ((((((int)threadIdx.x) >> 7) * 1024) + ((((int)threadIdx.x) & 15) * 64)) + (((((((int)threadIdx.x) & 31) >> 4) + (((int)threadIdx.x) & 15)) & 7) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(A_fragment_ptr + 0))[0]), "=r"(((unsigned *)(A_fragment_ptr + 0))[1]), "=r"(((unsigned *)(A_fragment_ptr + 0))[2]), "=r"(((unsigned *)(A_fragment_ptr + 0))[3])
      : "r"(addr)
    );
  }
  int cse_v9 = (((int)threadIdx.x) & 127);
  int cse_v31 = (((((((int)threadIdx.x) & 127) >> 4) + (((int)threadIdx.x) & 15)) & 7) * 8);

  {
    unsigned int addr = __cvta_generic_to_shared((&(B_shared_ptr[0])) + (((((int)threadIdx.x) & 15) * 64) + (((((((int)threadIdx.x) & 127) >> 4) + (((int)threadIdx.x) & 15)) & 7) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(B_fragment_ptr + 0))[0]), "=r"(((unsigned *)(B_fragment_ptr + 0))[1]), "=r"(((unsigned *)(B_fragment_ptr + 0))[2]), "=r"(((unsigned *)(B_fragment_ptr + 0))[3])
      : "r"(addr)
    );
  }
  for (int k_outer = 0; k_outer < 4; ++k_outer) {
    if (k_outer < 2) {
      int cse_v17 = ((k_outer + 2) % 3);
      ptx_cp_async_legacy_cg_16_2_2((&(A_shared_ptr[(((k_outer + 2) % 3) * 2048)])), (((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)), A_ptr, (((((((((int)blockIdx.x) >> 2) * 16384) + ((((int)blockIdx.x) & 1) * 8192)) + ((((int)threadIdx.x) >> 3) * 256)) + (k_outer * 64)) + ((((int)threadIdx.x) & 7) * 8)) + 128));
      int cse_v23 = (((k_outer + 2) % 3) * 4096);
      int cse_v32 = ((((k_outer * 8192) + ((((int)threadIdx.x) >> 3) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + ((((int)threadIdx.x) & 7) * 8));
      ptx_cp_async_legacy_cg_16_2_2((&(B_shared_ptr[(((k_outer + 2) % 3) * 4096)])), (((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)), B_ptr, (((((k_outer * 8192) + ((((int)threadIdx.x) >> 3) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + ((((int)threadIdx.x) & 7) * 8)) + 16384));
      ptx_cp_async_legacy_cg_16_2_2((&(B_shared_ptr[(((k_outer + 2) % 3) * 4096)])), ((((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)) + 2048), B_ptr, (((((k_outer * 8192) + ((((int)threadIdx.x) >> 3) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + ((((int)threadIdx.x) & 7) * 8)) + 20480));
    }
    tvm_builtin_ptx_cp_async_commit_group_async_commit_group();
    #pragma unroll
    for (int k_inner = 0; k_inner < 4; ++k_inner) {
      int cse_v10 = (k_inner + 1);
      int cse_v18 = ((k_inner + 1) & 3);
      if (((k_inner + 1) % 4) == 0) {
        tvm_builtin_ptx_cp_async_wait_group_async_wait_group_1();
        __syncthreads();
      }
      int cse_v24 = (((k_inner + 1) & 1) * 8);
      int cse_v28 = ((((k_inner + 1) >> 2) + k_outer) % 3);

  {
    unsigned int addr = __cvta_generic_to_shared((&(A_shared_ptr[(((((k_inner + 1) >> 2) + k_outer) % 3) * 2048)])) + ((((((int)threadIdx.x) >> 7) * 1024) + ((((int)threadIdx.x) & 15) * 64)) + (((((((k_inner + 1) & 3) * 2) + ((((int)threadIdx.x) & 31) >> 4)) + (((int)threadIdx.x) & 15)) & 7) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(A_fragment_ptr + (((k_inner + 1) & 1) * 8)))[0]), "=r"(((unsigned *)(A_fragment_ptr + (((k_inner + 1) & 1) * 8)))[1]), "=r"(((unsigned *)(A_fragment_ptr + (((k_inner + 1) & 1) * 8)))[2]), "=r"(((unsigned *)(A_fragment_ptr + (((k_inner + 1) & 1) * 8)))[3])
      : "r"(addr)
    );
  }

  {
    unsigned int addr = __cvta_generic_to_shared((&(B_shared_ptr[(((((k_inner + 1) >> 2) + k_outer) % 3) * 4096)])) + (((((k_inner + 1) & 3) * 1024) + ((((int)threadIdx.x) & 15) * 64)) + (((((((int)threadIdx.x) & 127) >> 4) + (((int)threadIdx.x) & 15)) & 7) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(B_fragment_ptr + (((k_inner + 1) & 1) * 8)))[0]), "=r"(((unsigned *)(B_fragment_ptr + (((k_inner + 1) & 1) * 8)))[1]), "=r"(((unsigned *)(B_fragment_ptr + (((k_inner + 1) & 1) * 8)))[2]), "=r"(((unsigned *)(B_fragment_ptr + (((k_inner + 1) & 1) * 8)))[3])
      : "r"(addr)
    );
  }
      #pragma unroll
      for (int j = 0; j < 2; ++j) {
        int cse_v11 = (j * 4);
        int cse_v19 = ((k_inner & 1) * 8);

  {
    __asm__ __volatile__(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
      :  "=f"(((float *)(C_fragment_ptr + (j * 4)))[0]), "=f"(((float *)(C_fragment_ptr + (j * 4)))[1]), "=f"(((float *)(C_fragment_ptr + (j * 4)))[2]), "=f"(((float *)(C_fragment_ptr + (j * 4)))[3])
      : "r"(((unsigned *)(A_fragment_ptr + ((k_inner & 1) * 8)))[0]), "r"(((unsigned *)(A_fragment_ptr + ((k_inner & 1) * 8)))[1]), "r"(((unsigned *)(A_fragment_ptr + ((k_inner & 1) * 8)))[2]), "r"(((unsigned *)(A_fragment_ptr + ((k_inner & 1) * 8)))[3]), "r"(((unsigned *)(B_fragment_ptr + (((k_inner & 1) * 8) + (j * 4))))[0]), "r"(((unsigned *)(B_fragment_ptr + (((k_inner & 1) * 8) + (j * 4))))[1]), "f"(((float *)(C_fragment_ptr + (j * 4)))[0]), "f"(((float *)(C_fragment_ptr + (j * 4)))[1]), "f"(((float *)(C_fragment_ptr + (j * 4)))[2]), "f"(((float *)(C_fragment_ptr + (j * 4)))[3]));
  }
      }
    }
  }
  int cse_v12 = (((int)threadIdx.x) & 1);
  float condval;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval = C_fragment_ptr[0];
  } else {
    condval = C_fragment_ptr[4];
  }
  taken_ptr[0] = __shfl_xor_sync((uint)4294967295, condval, 1, 32);
  float condval_1;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_1 = taken_ptr[0];
  } else {
    condval_1 = C_fragment_ptr[0];
  }
  piece_ptr[0] = condval_1;
  float condval_2;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_2 = C_fragment_ptr[4];
  } else {
    condval_2 = taken_ptr[0];
  }
  piece_ptr[2] = condval_2;
  float condval_3;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_3 = C_fragment_ptr[1];
  } else {
    condval_3 = C_fragment_ptr[5];
  }
  taken_ptr_1[0] = __shfl_xor_sync((uint)4294967295, condval_3, 1, 32);
  float condval_4;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_4 = taken_ptr_1[0];
  } else {
    condval_4 = C_fragment_ptr[1];
  }
  piece_ptr[1] = condval_4;
  float condval_5;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_5 = C_fragment_ptr[5];
  } else {
    condval_5 = taken_ptr_1[0];
  }
  piece_ptr[3] = condval_5;
  int cse_v20 = ((((int)threadIdx.x) & 1) * 8);
  int cse_v25 = (((((int)threadIdx.x) & 127) >> 5) * 16);
  int cse_v26 = (((((int)threadIdx.x) & 3) >> 1) * 4);
  int cse_v34 = ((((((((int)blockIdx.x) & 3) >> 1) * 64) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4));
  *(half4*)(input_ptr + 0) = *(half4*)(bias_ptr + ((((((((int)blockIdx.x) & 3) >> 1) * 64) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4)));
  int cse_v35 = (((((((((((int)blockIdx.x) >> 2) * 8192) + ((((int)blockIdx.x) & 1) * 4096)) + ((((int)threadIdx.x) >> 7) * 2048)) + (((((int)threadIdx.x) & 31) >> 2) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4));
  *(half4*)(input_ptr_1 + 0) = *(half4*)(residual_ptr + (((((((((((int)blockIdx.x) >> 2) * 8192) + ((((int)blockIdx.x) & 1) * 4096)) + ((((int)threadIdx.x) >> 7) * 2048)) + (((((int)threadIdx.x) & 31) >> 2) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4)));
  input_ptr[0] = (htanh((((half)piece_ptr[0]) + input_ptr[0])) + input_ptr_1[0]);
  input_ptr[1] = (htanh((((half)piece_ptr[1]) + input_ptr[1])) + input_ptr_1[1]);
  input_ptr[2] = (htanh((((half)piece_ptr[2]) + input_ptr[2])) + input_ptr_1[2]);
  input_ptr[3] = (htanh((((half)piece_ptr[3]) + input_ptr[3])) + input_ptr_1[3]);
  *(half4*)(C_ptr + (((((((((((int)blockIdx.x) >> 2) * 8192) + ((((int)blockIdx.x) & 1) * 4096)) + ((((int)threadIdx.x) >> 7) * 2048)) + (((((int)threadIdx.x) & 31) >> 2) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4))) = *(half4*)(input_ptr + 0);
  float condval_6;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_6 = C_fragment_ptr[2];
  } else {
    condval_6 = C_fragment_ptr[6];
  }
  taken_ptr[0] = __shfl_xor_sync((uint)4294967295, condval_6, 1, 32);
  float condval_7;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_7 = taken_ptr[0];
  } else {
    condval_7 = C_fragment_ptr[2];
  }
  piece_ptr[0] = condval_7;
  float condval_8;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_8 = C_fragment_ptr[6];
  } else {
    condval_8 = taken_ptr[0];
  }
  piece_ptr[2] = condval_8;
  float condval_9;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_9 = C_fragment_ptr[3];
  } else {
    condval_9 = C_fragment_ptr[7];
  }
  taken_ptr_1[0] = __shfl_xor_sync((uint)4294967295, condval_9, 1, 32);
  float condval_10;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_10 = taken_ptr_1[0];
  } else {
    condval_10 = C_fragment_ptr[3];
  }
  piece_ptr[1] = condval_10;
  float condval_11;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_11 = C_fragment_ptr[7];
  } else {
    condval_11 = taken_ptr_1[0];
  }
  piece_ptr[3] = condval_11;
  *(half4*)(input_ptr + 0) = *(half4*)(bias_ptr + ((((((((int)blockIdx.x) & 3) >> 1) * 64) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4)));
  int cse_v36 = ((((((((((((int)blockIdx.x) >> 2) * 8192) + ((((int)blockIdx.x) & 1) * 4096)) + ((((int)threadIdx.x) >> 7) * 2048)) + (((((int)threadIdx.x) & 31) >> 2) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4)) + 1024);
  *(half4*)(input_ptr_1 + 0) = *(half4*)(residual_ptr + ((((((((((((int)blockIdx.x) >> 2) * 8192) + ((((int)blockIdx.x) & 1) * 4096)) + ((((int)threadIdx.x) >> 7) * 2048)) + (((((int)threadIdx.x) & 31) >> 2) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4)) + 1024));
  input_ptr[0] = (htanh((((half)piece_ptr[0]) + input_ptr[0])) + input_ptr_1[0]);
  input_ptr[1] = (htanh((((half)piece_ptr[1]) + input_ptr[1])) + input_ptr_1[1]);
  input_ptr[2] = (htanh((((half)piece_ptr[2]) + input_ptr[2])) + input_ptr_1[2]);
  input_ptr[3] = (htanh((((half)piece_ptr[3]) + input_ptr[3])) + input_ptr_1[3]);
  *(half4*)(C_ptr + ((((((((((((int)blockIdx.x) >> 2) * 8192) + ((((int)blockIdx.x) & 1) * 4096)) + ((((int)threadIdx.x) >> 7) * 2048)) + (((((int)threadIdx.x) & 31) >> 2) * 128)) + (((((int)blockIdx.x) & 3) >> 1) * 64)) + (((((int)threadIdx.x) & 127) >> 5) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4)) + 1024)) = *(half4*)(input_ptr + 0);
}

