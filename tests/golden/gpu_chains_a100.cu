extern "C" __global__ void __launch_bounds__(256, 2) main_kernel(half* __restrict__ W0_ptr, half* __restrict__ W1_ptr, half* __restrict__ X_ptr, half* __restrict__ bias0_ptr, half* __restrict__ bias1_ptr, half* __restrict__ compute_ptr);
extern "C" __global__ void __launch_bounds__(256, 2) main_kernel(half* __restrict__ W0_ptr, half* __restrict__ W1_ptr, half* __restrict__ X_ptr, half* __restrict__ bias0_ptr, half* __restrict__ bias1_ptr, half* __restrict__ compute_ptr) {
  __shared__ alignas(16) half B1_shared_ptr[512];
  alignas(16) float C_fragment0_ptr[16];
  __shared__ alignas(16) half A_shared_ptr[8192];
  __shared__ alignas(16) half B0_shared_ptr[2048];
  alignas(16) half A_fragment0_ptr[8];
  alignas(16) half B_fragment0_ptr[16];
  alignas(16) half2 held0_ptr[8];
  alignas(16) float C_fragment1_ptr[8];
  alignas(16) half B_fragment1_ptr[8];
  alignas(16) float taken_ptr[1];
  alignas(16) float piece_ptr[4];
  alignas(16) float taken_ptr_1[1];
  int cse_v1 = (((int)threadIdx.x) * 8);
  int cse_v2 = (((int)threadIdx.x) >> 3);
  int cse_v3 = (((int)threadIdx.x) & 1);
  if (((int)threadIdx.x) < 64) {
    *(uint4*)(B1_shared_ptr + (((((int)threadIdx.x) >> 1) * 16) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 1)) & 1) * 8))) = *(uint4*)(W1_ptr + (((int)threadIdx.x) * 8));
  }
  C_fragment0_ptr[0] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[1] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[2] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[3] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[4] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[5] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[6] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[7] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[8] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[9] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[10] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[11] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[12] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[13] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[14] = 0x0p+0f/*0.000000e+00*/;
  C_fragment0_ptr[15] = 0x0p+0f/*0.000000e+00*/;
  int cse_v15 = (((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8));
  *(uint4*)(A_shared_ptr + (((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8))) = *(uint4*)(X_ptr + (((int)threadIdx.x) * 8));
  *(uint4*)(A_shared_ptr + ((((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)) + 2048)) = *(uint4*)(X_ptr + ((((int)threadIdx.x) * 8) + 2048));
  *(uint4*)(A_shared_ptr + ((((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)) + 4096)) = make_uint4(__pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)));
  *(uint4*)(A_shared_ptr + ((((((int)threadIdx.x) >> 3) * 64) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 7)) & 7) * 8)) + 6144)) = make_uint4(__pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)), __pack_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/)));
  int cse_v4 = (((int)threadIdx.x) & 3);
  *(uint4*)(B0_shared_ptr + (((((int)threadIdx.x) >> 2) * 32) + ((((((int)threadIdx.x) >> 3) + (((int)threadIdx.x) & 3)) & 3) * 8))) = *(uint4*)(W0_ptr + (((int)threadIdx.x) * 8));
  int cse_v5 = (((int)threadIdx.x) >> 5);
  int cse_v6 = (((int)threadIdx.x) & 15);
  int cse_v7 = (((int)threadIdx.x) & 31);
  int cse_v10 = ((((int)threadIdx.x) & 31) >> 4);
  __syncthreads();
  #pragma unroll
  for (int k_inner = 0; k_inner < 4; ++k_inner) {

  {
    unsigned int addr = __cvta_generic_to_shared((&(A_shared_ptr[0])) + ((((((int)threadIdx.x) >> 5) * 1024) + ((((int)threadIdx.x) & 15) * 64)) + (((((k_inner * 2) + ((((int)threadIdx.x) & 31) >> 4)) + (((int)threadIdx.x) & 15)) & 7) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(A_fragment0_ptr + 0))[0]), "=r"(((unsigned *)(A_fragment0_ptr + 0))[1]), "=r"(((unsigned *)(A_fragment0_ptr + 0))[2]), "=r"(((unsigned *)(A_fragment0_ptr + 0))[3])
      : "r"(addr)
    );
  }
    #pragma unroll
    for (int j = 0; j < 2; ++j) {

  {
    unsigned int addr = __cvta_generic_to_shared((&(B0_shared_ptr[0])) + (((k_inner * 512) + ((((int)threadIdx.x) & 15) * 32)) + (((((j * 2) + ((((int)threadIdx.x) & 31) >> 4)) + ((((int)threadIdx.x) & 15) >> 1)) & 3) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(B_fragment0_ptr + (j * 8)))[0]), "=r"(((unsigned *)(B_fragment0_ptr + (j * 8)))[1]), "=r"(((unsigned *)(B_fragment0_ptr + (j * 8)))[2]), "=r"(((unsigned *)(B_fragment0_ptr + (j * 8)))[3])
      : "r"(addr)
    );
  }
    }
    #pragma unroll
    for (int j_1 = 0; j_1 < 4; ++j_1) {
      int cse_v8 = (j_1 * 4);

  {
    __asm__ __volatile__(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
      :  "=f"(((float *)(C_fragment0_ptr + (j_1 * 4)))[0]), "=f"(((float *)(C_fragment0_ptr + (j_1 * 4)))[1]), "=f"(((float *)(C_fragment0_ptr + (j_1 * 4)))[2]), "=f"(((float *)(C_fragment0_ptr + (j_1 * 4)))[3])
      : "r"(((unsigned *)(A_fragment0_ptr + 0))[0]), "r"(((unsigned *)(A_fragment0_ptr + 0))[1]), "r"(((unsigned *)(A_fragment0_ptr + 0))[2]), "r"(((unsigned *)(A_fragment0_ptr + 0))[3]), "r"(((unsigned *)(B_fragment0_ptr + (j_1 * 4)))[0]), "r"(((unsigned *)(B_fragment0_ptr + (j_1 * 4)))[1]), "f"(((float *)(C_fragment0_ptr + (j_1 * 4)))[0]), "f"(((float *)(C_fragment0_ptr + (j_1 * 4)))[1]), "f"(((float *)(C_fragment0_ptr + (j_1 * 4)))[2]), "f"(((float *)(C_fragment0_ptr + (j_1 * 4)))[3]));
  }
    }
  }
  #pragma unroll
  for (int k = 0; k < 2; ++k) {
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        int cse_v12 = (((k * 4) + (c * 2)) + h);
        if (((int)threadIdx.x) < 128) {
          half2 __1;
          float2 __2;
            float2 v_ = *(float2*)(C_fragment0_ptr + (((k * 8) + (c * 4)) + (h * 2)));
            float2 __3;
            half2 v__1 = *(half2*)(bias0_ptr + (((k * 16) + (c * 8)) + ((((int)threadIdx.x) & 3) * 2)));
            __3.x = (float)(v__1.x);
            __3.y = (float)(v__1.y);
            __2.x = (v_.x+__3.x);
            __2.y = (v_.y+__3.y);
          float2 t = __2;
          float2 __4;
          ushort2 __5;
            float2 v__2 = make_float2(0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/);
            __5.x = (t.x<v__2.x);
            __5.y = (t.y<v__2.y);
          float2 v__3 = make_float2(0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/);
          __4.x = (bool(__5.x)?v__3.x:t.x);
          __4.y = (bool(__5.y)?v__3.y:t.y);
          __1.x = (half)(__4.x);
          __1.y = (half)(__4.y);
          held0_ptr[(((k * 4) + (c * 2)) + h)] = __1;
        } else {
          held0_ptr[(((k * 4) + (c * 2)) + h)] = make_half2(__float2half_rn(0x0p+0f/*0.000000e+00*/), __float2half_rn(0x0p+0f/*0.000000e+00*/));
        }
      }
    }
  }
  C_fragment1_ptr[0] = 0x0p+0f/*0.000000e+00*/;
  C_fragment1_ptr[1] = 0x0p+0f/*0.000000e+00*/;
  C_fragment1_ptr[2] = 0x0p+0f/*0.000000e+00*/;
  C_fragment1_ptr[3] = 0x0p+0f/*0.000000e+00*/;
  C_fragment1_ptr[4] = 0x0p+0f/*0.000000e+00*/;
  C_fragment1_ptr[5] = 0x0p+0f/*0.000000e+00*/;
  C_fragment1_ptr[6] = 0x0p+0f/*0.000000e+00*/;
  C_fragment1_ptr[7] = 0x0p+0f/*0.000000e+00*/;
  #pragma unroll
  for (int k_inner_1 = 0; k_inner_1 < 2; ++k_inner_1) {

  {
    unsigned int addr = __cvta_generic_to_shared((&(B1_shared_ptr[0])) + (((k_inner_1 * 256) + ((((int)threadIdx.x) & 15) * 16)) + (((((((int)threadIdx.x) & 31) >> 4) + ((((int)threadIdx.x) & 15) >> 2)) & 1) * 8)));
    __asm__ __volatile__(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
      "{%0, %1, %2, %3}, [%4];\n"
      : "=r"(((unsigned *)(B_fragment1_ptr + 0))[0]), "=r"(((unsigned *)(B_fragment1_ptr + 0))[1]), "=r"(((unsigned *)(B_fragment1_ptr + 0))[2]), "=r"(((unsigned *)(B_fragment1_ptr + 0))[3])
      : "r"(addr)
    );
  }
    #pragma unroll
    for (int j_2 = 0; j_2 < 2; ++j_2) {
      int cse_v9 = (j_2 * 4);

  {
    __asm__ __volatile__(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n"
      :  "=f"(((float *)(C_fragment1_ptr + (j_2 * 4)))[0]), "=f"(((float *)(C_fragment1_ptr + (j_2 * 4)))[1]), "=f"(((float *)(C_fragment1_ptr + (j_2 * 4)))[2]), "=f"(((float *)(C_fragment1_ptr + (j_2 * 4)))[3])
      : "r"(((unsigned *)(held0_ptr + (k_inner_1 * 8)))[0]), "r"(((unsigned *)(held0_ptr + (k_inner_1 * 8)))[1]), "r"(((unsigned *)(held0_ptr + (k_inner_1 * 8)))[2]), "r"(((unsigned *)(held0_ptr + (k_inner_1 * 8)))[3]), "r"(((unsigned *)(B_fragment1_ptr + (j_2 * 4)))[0]), "r"(((unsigned *)(B_fragment1_ptr + (j_2 * 4)))[1]), "f"(((float *)(C_fragment1_ptr + (j_2 * 4)))[0]), "f"(((float *)(C_fragment1_ptr + (j_2 * 4)))[1]), "f"(((float *)(C_fragment1_ptr + (j_2 * 4)))[2]), "f"(((float *)(C_fragment1_ptr + (j_2 * 4)))[3]));
  }
    }
  }
  float condval;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval = C_fragment1_ptr[0];
  } else {
    condval = C_fragment1_ptr[4];
  }
  taken_ptr[0] = __shfl_xor_sync((uint)4294967295, condval, 1, 32);
  float condval_1;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_1 = taken_ptr[0];
  } else {
    condval_1 = C_fragment1_ptr[0];
  }
  piece_ptr[0] = condval_1;
  float condval_2;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_2 = C_fragment1_ptr[4];
  } else {
    condval_2 = taken_ptr[0];
  }
  piece_ptr[2] = condval_2;
  float condval_3;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_3 = C_fragment1_ptr[1];
  } else {
    condval_3 = C_fragment1_ptr[5];
  }
  taken_ptr_1[0] = __shfl_xor_sync((uint)4294967295, condval_3, 1, 32);
  float condval_4;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_4 = taken_ptr_1[0];
  } else {
    condval_4 = C_fragment1_ptr[1];
  }
  piece_ptr[1] = condval_4;
  float condval_5;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_5 = C_fragment1_ptr[5];
  } else {
    condval_5 = taken_ptr_1[0];
  }
  piece_ptr[3] = condval_5;
  int cse_v11 = ((((int)threadIdx.x) & 1) * 8);
  int cse_v13 = (((((int)threadIdx.x) & 3) >> 1) * 4);
  int cse_v14 = (((((int)threadIdx.x) & 1) * 8) + (((((int)threadIdx.x) & 3) >> 1) * 4));
  int cse_v16 = (((((((int)threadIdx.x) >> 5) * 256) + (((((int)threadIdx.x) & 31) >> 2) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4));
  if (((int)threadIdx.x) < 128) {
    half4 __6;
    float4 __7;
      float4 v__4 = *(float4*)(piece_ptr + 0);
      float4 __8;
      half4 v__5 = *(half4*)(bias1_ptr + (((((int)threadIdx.x) & 1) * 8) + (((((int)threadIdx.x) & 3) >> 1) * 4)));
      __8.x = (float)(v__5.x);
      __8.y = (float)(v__5.y);
      __8.z = (float)(v__5.z);
      __8.w = (float)(v__5.w);
      __7.x = (v__4.x+__8.x);
      __7.y = (v__4.y+__8.y);
      __7.z = (v__4.z+__8.z);
      __7.w = (v__4.w+__8.w);
    float4 t_1 = __7;
    float4 __9;
    ushort4 __10;
      float4 v__6 = make_float4(0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/);
      __10.x = (t_1.x<v__6.x);
      __10.y = (t_1.y<v__6.y);
      __10.z = (t_1.z<v__6.z);
      __10.w = (t_1.w<v__6.w);
    float4 v__7 = make_float4(0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/);
    __9.x = (bool(__10.x)?v__7.x:t_1.x);
    __9.y = (bool(__10.y)?v__7.y:t_1.y);
    __9.z = (bool(__10.z)?v__7.z:t_1.z);
    __9.w = (bool(__10.w)?v__7.w:t_1.w);
    __6.x = (half)(__9.x);
    __6.y = (half)(__9.y);
    __6.z = (half)(__9.z);
    __6.w = (half)(__9.w);
    *(half4*)(compute_ptr + (((((((int)threadIdx.x) >> 5) * 256) + (((((int)threadIdx.x) & 31) >> 2) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4))) = __6;
  }
  float condval_6;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_6 = C_fragment1_ptr[2];
  } else {
    condval_6 = C_fragment1_ptr[6];
  }
  taken_ptr[0] = __shfl_xor_sync((uint)4294967295, condval_6, 1, 32);
  float condval_7;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_7 = taken_ptr[0];
  } else {
    condval_7 = C_fragment1_ptr[2];
  }
  piece_ptr[0] = condval_7;
  float condval_8;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_8 = C_fragment1_ptr[6];
  } else {
    condval_8 = taken_ptr[0];
  }
  piece_ptr[2] = condval_8;
  float condval_9;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_9 = C_fragment1_ptr[3];
  } else {
    condval_9 = C_fragment1_ptr[7];
  }
  taken_ptr_1[0] = __shfl_xor_sync((uint)4294967295, condval_9, 1, 32);
  float condval_10;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_10 = taken_ptr_1[0];
  } else {
    condval_10 = C_fragment1_ptr[3];
  }
  piece_ptr[1] = condval_10;
  float condval_11;
  if ((((int)threadIdx.x) & 1) == 1) {
    condval_11 = C_fragment1_ptr[7];
  } else {
    condval_11 = taken_ptr_1[0];
  }
  piece_ptr[3] = condval_11;
  if (((int)threadIdx.x) < 128) {
    half4 __11;
    float4 __12;
      float4 v__8 = *(float4*)(piece_ptr + 0);
      float4 __13;
      half4 v__9 = *(half4*)(bias1_ptr + (((((int)threadIdx.x) & 1) * 8) + (((((int)threadIdx.x) & 3) >> 1) * 4)));
      __13.x = (float)(v__9.x);
      __13.y = (float)(v__9.y);
      __13.z = (float)(v__9.z);
      __13.w = (float)(v__9.w);
      __12.x = (v__8.x+__13.x);
      __12.y = (v__8.y+__13.y);
      __12.z = (v__8.z+__13.z);
      __12.w = (v__8.w+__13.w);
    float4 t_2 = __12;
    float4 __14;
    ushort4 __15;
      float4 v__10 = make_float4(0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/);
      __15.x = (t_2.x<v__10.x);
      __15.y = (t_2.y<v__10.y);
      __15.z = (t_2.z<v__10.z);
      __15.w = (t_2.w<v__10.w);
    float4 v__11 = make_float4(0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/, 0x0p+0f/*0.000000e+00*/);
    __14.x = (bool(__15.x)?v__11.x:t_2.x);
    __14.y = (bool(__15.y)?v__11.y:t_2.y);
    __14.z = (bool(__15.z)?v__11.z:t_2.z);
    __14.w = (bool(__15.w)?v__11.w:t_2.w);
    __11.x = (half)(__14.x);
    __11.y = (half)(__14.y);
    __11.z = (half)(__14.z);
    __11.w = (half)(__14.w);
    *(half4*)(compute_ptr + ((((((((int)threadIdx.x) >> 5) * 256) + (((((int)threadIdx.x) & 31) >> 2) * 16)) + ((((int)threadIdx.x) & 1) * 8)) + (((((int)threadIdx.x) & 3) >> 1) * 4)) + 128)) = __11;
  }
}

