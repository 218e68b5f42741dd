extern "C" __global__ void __launch_bounds__(64) main_kernel(half* __restrict__ compute_intermediate_ptr, half* __restrict__ x0_ptr, half* __restrict__ x1_ptr);
extern "C" __global__ void __launch_bounds__(64) main_kernel(half* __restrict__ compute_intermediate_ptr, half* __restrict__ x0_ptr, half* __restrict__ x1_ptr) {
  alignas(16) half x_ptr[8];
  alignas(16) half x_ptr_1[8];
  int cse_v1 = ((((int)blockIdx.x) * 512) + (((int)threadIdx.x) * 8));
  *(uint4*)(x_ptr + 0) = *(uint4*)(x0_ptr + ((((int)blockIdx.x) * 512) + (((int)threadIdx.x) * 8)));
  *(uint4*)(x_ptr_1 + 0) = *(uint4*)(x1_ptr + ((((((int)blockIdx.x) * 64) + ((int)threadIdx.x)) % 96) * 8));
  float t = (((float)x_ptr[0]) + ((float)x_ptr_1[0]));
  x_ptr[0] = ((half)((t < 0x0p+0f/*0.000000e+00*/) ? 0x0p+0f/*0.000000e+00*/ : t));
  float t_1 = (((float)x_ptr[1]) + ((float)x_ptr_1[1]));
  x_ptr[1] = ((half)((t_1 < 0x0p+0f/*0.000000e+00*/) ? 0x0p+0f/*0.000000e+00*/ : t_1));
  float t_2 = (((float)x_ptr[2]) + ((float)x_ptr_1[2]));
  x_ptr[2] = ((half)((t_2 < 0x0p+0f/*0.000000e+00*/) ? 0x0p+0f/*0.000000e+00*/ : t_2));
  float t_3 = (((float)x_ptr[3]) + ((float)x_ptr_1[3]));
  x_ptr[3] = ((half)((t_3 < 0x0p+0f/*0.000000e+00*/) ? 0x0p+0f/*0.000000e+00*/ : t_3));
  float t_4 = (((float)x_ptr[4]) + ((float)x_ptr_1[4]));
  x_ptr[4] = ((half)((t_4 < 0x0p+0f/*0.000000e+00*/) ? 0x0p+0f/*0.000000e+00*/ : t_4));
  float t_5 = (((float)x_ptr[5]) + ((float)x_ptr_1[5]));
  x_ptr[5] = ((half)((t_5 < 0x0p+0f/*0.000000e+00*/) ? 0x0p+0f/*0.000000e+00*/ : t_5));
  float t_6 = (((float)x_ptr[6]) + ((float)x_ptr_1[6]));
  x_ptr[6] = ((half)((t_6 < 0x0p+0f/*0.000000e+00*/) ? 0x0p+0f/*0.000000e+00*/ : t_6));
  float t_7 = (((float)x_ptr[7]) + ((float)x_ptr_1[7]));
  x_ptr[7] = ((half)((t_7 < 0x0p+0f/*0.000000e+00*/) ? 0x0p+0f/*0.000000e+00*/ : t_7));
  *(uint4*)(compute_intermediate_ptr + ((((int)blockIdx.x) * 512) + (((int)threadIdx.x) * 8))) = *(uint4*)(x_ptr + 0);
}

