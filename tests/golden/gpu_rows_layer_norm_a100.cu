extern "C" __global__ void __launch_bounds__(256) main_kernel(float* __restrict__ T_layer_norm_ptr, float* __restrict__ x0_ptr, float* __restrict__ x1_ptr, float* __restrict__ x2_ptr);
extern "C" __global__ void __launch_bounds__(256) main_kernel(float* __restrict__ T_layer_norm_ptr, float* __restrict__ x0_ptr, float* __restrict__ x1_ptr, float* __restrict__ x2_ptr) {
  alignas(16) float x0_sum_part_ptr[1];
  alignas(16) float x_ptr[4];
  __shared__ alignas(64) float red_result_ptr[1];
  alignas(16) float x0_mean_value_ptr[1];
  alignas(16) float x0_var_sum_part_ptr[1];
  __shared__ alignas(64) float red_result_ptr_1[1];
  alignas(16) float x_ptr_1[4];
  alignas(16) float x_ptr_2[4];
  alignas(16) float y_ptr[4];
  x0_sum_part_ptr[0] = 0x0p+0f/*0.000000e+00*/;
  int cse_v1 = (((int)threadIdx.x) * 4);
  int cse_v2 = ((((int)blockIdx.x) * 768) + (((int)threadIdx.x) * 4));
  if (((int)threadIdx.x) < 192) {
    *(float4*)(x_ptr + 0) = *(float4*)(x0_ptr + ((((int)blockIdx.x) * 768) + (((int)threadIdx.x) * 4)));
    x0_sum_part_ptr[0] = (x0_sum_part_ptr[0] + x_ptr[0]);
    x0_sum_part_ptr[0] = (x0_sum_part_ptr[0] + x_ptr[1]);
    x0_sum_part_ptr[0] = (x0_sum_part_ptr[0] + x_ptr[2]);
    x0_sum_part_ptr[0] = (x0_sum_part_ptr[0] + x_ptr[3]);
  }
  __shared__ alignas(64) float red_buf_staging_ptr[8];
  alignas(64) float t0_ptr[1];
  alignas(64) uint mask_ptr[1];
  alignas(64) float red_buf0_ptr[1];
  alignas(64) float t0_ptr_1[1];
  alignas(64) uint mask_ptr_1[1];
  alignas(64) float red_buf0_ptr_1[1];
  red_buf0_ptr[0] = x0_sum_part_ptr[0];
  mask_ptr[0] = __activemask();
  t0_ptr[0] = __shfl_down_sync(mask_ptr[0], red_buf0_ptr[0], 16, 32);
  red_buf0_ptr[0] = (red_buf0_ptr[0] + t0_ptr[0]);
  t0_ptr[0] = __shfl_down_sync(mask_ptr[0], red_buf0_ptr[0], 8, 32);
  red_buf0_ptr[0] = (red_buf0_ptr[0] + t0_ptr[0]);
  t0_ptr[0] = __shfl_down_sync(mask_ptr[0], red_buf0_ptr[0], 4, 32);
  red_buf0_ptr[0] = (red_buf0_ptr[0] + t0_ptr[0]);
  t0_ptr[0] = __shfl_down_sync(mask_ptr[0], red_buf0_ptr[0], 2, 32);
  red_buf0_ptr[0] = (red_buf0_ptr[0] + t0_ptr[0]);
  t0_ptr[0] = __shfl_down_sync(mask_ptr[0], red_buf0_ptr[0], 1, 32);
  red_buf0_ptr[0] = (red_buf0_ptr[0] + t0_ptr[0]);
  if ((((int)threadIdx.x) % 32) == 0) {
    red_buf_staging_ptr[(((int)threadIdx.x) >> 5)] = red_buf0_ptr[0];
  }
  __syncthreads();
  if (((int)threadIdx.x) < 8) {
    red_buf0_ptr_1[0] = red_buf_staging_ptr[((int)threadIdx.x)];
  }
  mask_ptr_1[0] = __activemask();
  t0_ptr_1[0] = __shfl_down_sync(mask_ptr_1[0], red_buf0_ptr_1[0], 4, 32);
  red_buf0_ptr_1[0] = (red_buf0_ptr_1[0] + t0_ptr_1[0]);
  t0_ptr_1[0] = __shfl_down_sync(mask_ptr_1[0], red_buf0_ptr_1[0], 2, 32);
  red_buf0_ptr_1[0] = (red_buf0_ptr_1[0] + t0_ptr_1[0]);
  t0_ptr_1[0] = __shfl_down_sync(mask_ptr_1[0], red_buf0_ptr_1[0], 1, 32);
  red_buf0_ptr_1[0] = (red_buf0_ptr_1[0] + t0_ptr_1[0]);
  if (((int)threadIdx.x) == 0) {
    ((volatile float*)red_result_ptr)[0] = red_buf0_ptr_1[0];
  }
  __syncthreads();
  x0_mean_value_ptr[0] = (((volatile float*)red_result_ptr)[0] / 0x1.8p+9f/*7.680000e+02*/);
  x0_var_sum_part_ptr[0] = 0x0p+0f/*0.000000e+00*/;
  if (((int)threadIdx.x) < 192) {
    x0_var_sum_part_ptr[0] = (x0_var_sum_part_ptr[0] + ((x_ptr[0] - x0_mean_value_ptr[0]) * (x_ptr[0] - x0_mean_value_ptr[0])));
    x0_var_sum_part_ptr[0] = (x0_var_sum_part_ptr[0] + ((x_ptr[1] - x0_mean_value_ptr[0]) * (x_ptr[1] - x0_mean_value_ptr[0])));
    x0_var_sum_part_ptr[0] = (x0_var_sum_part_ptr[0] + ((x_ptr[2] - x0_mean_value_ptr[0]) * (x_ptr[2] - x0_mean_value_ptr[0])));
    x0_var_sum_part_ptr[0] = (x0_var_sum_part_ptr[0] + ((x_ptr[3] - x0_mean_value_ptr[0]) * (x_ptr[3] - x0_mean_value_ptr[0])));
  }
  __shared__ alignas(64) float red_buf_staging_ptr_1[8];
  alignas(64) float t0_ptr_2[1];
  alignas(64) uint mask_ptr_2[1];
  alignas(64) float red_buf0_ptr_2[1];
  alignas(64) float t0_ptr_3[1];
  alignas(64) uint mask_ptr_3[1];
  alignas(64) float red_buf0_ptr_3[1];
  red_buf0_ptr_2[0] = x0_var_sum_part_ptr[0];
  mask_ptr_2[0] = __activemask();
  t0_ptr_2[0] = __shfl_down_sync(mask_ptr_2[0], red_buf0_ptr_2[0], 16, 32);
  red_buf0_ptr_2[0] = (red_buf0_ptr_2[0] + t0_ptr_2[0]);
  t0_ptr_2[0] = __shfl_down_sync(mask_ptr_2[0], red_buf0_ptr_2[0], 8, 32);
  red_buf0_ptr_2[0] = (red_buf0_ptr_2[0] + t0_ptr_2[0]);
  t0_ptr_2[0] = __shfl_down_sync(mask_ptr_2[0], red_buf0_ptr_2[0], 4, 32);
  red_buf0_ptr_2[0] = (red_buf0_ptr_2[0] + t0_ptr_2[0]);
  t0_ptr_2[0] = __shfl_down_sync(mask_ptr_2[0], red_buf0_ptr_2[0], 2, 32);
  red_buf0_ptr_2[0] = (red_buf0_ptr_2[0] + t0_ptr_2[0]);
  t0_ptr_2[0] = __shfl_down_sync(mask_ptr_2[0], red_buf0_ptr_2[0], 1, 32);
  red_buf0_ptr_2[0] = (red_buf0_ptr_2[0] + t0_ptr_2[0]);
  if ((((int)threadIdx.x) % 32) == 0) {
    red_buf_staging_ptr_1[(((int)threadIdx.x) >> 5)] = red_buf0_ptr_2[0];
  }
  __syncthreads();
  if (((int)threadIdx.x) < 8) {
    red_buf0_ptr_3[0] = red_buf_staging_ptr_1[((int)threadIdx.x)];
  }
  mask_ptr_3[0] = __activemask();
  t0_ptr_3[0] = __shfl_down_sync(mask_ptr_3[0], red_buf0_ptr_3[0], 4, 32);
  red_buf0_ptr_3[0] = (red_buf0_ptr_3[0] + t0_ptr_3[0]);
  t0_ptr_3[0] = __shfl_down_sync(mask_ptr_3[0], red_buf0_ptr_3[0], 2, 32);
  red_buf0_ptr_3[0] = (red_buf0_ptr_3[0] + t0_ptr_3[0]);
  t0_ptr_3[0] = __shfl_down_sync(mask_ptr_3[0], red_buf0_ptr_3[0], 1, 32);
  red_buf0_ptr_3[0] = (red_buf0_ptr_3[0] + t0_ptr_3[0]);
  if (((int)threadIdx.x) == 0) {
    ((volatile float*)red_result_ptr_1)[0] = red_buf0_ptr_3[0];
  }
  __syncthreads();
  if (((int)threadIdx.x) < 192) {
    *(float4*)(x_ptr_1 + 0) = *(float4*)(x1_ptr + (((int)threadIdx.x) * 4));
    *(float4*)(x_ptr_2 + 0) = *(float4*)(x2_ptr + (((int)threadIdx.x) * 4));
    y_ptr[0] = ((((x_ptr[0] - x0_mean_value_ptr[0]) * rsqrtf(((((volatile float*)red_result_ptr_1)[0] / 0x1.8p+9f/*7.680000e+02*/) + 0x1.4f8b588e368f1p-17f/*1.000000e-05*/))) * x_ptr_1[0]) + x_ptr_2[0]);
    y_ptr[1] = ((((x_ptr[1] - x0_mean_value_ptr[0]) * rsqrtf(((((volatile float*)red_result_ptr_1)[0] / 0x1.8p+9f/*7.680000e+02*/) + 0x1.4f8b588e368f1p-17f/*1.000000e-05*/))) * x_ptr_1[1]) + x_ptr_2[1]);
    y_ptr[2] = ((((x_ptr[2] - x0_mean_value_ptr[0]) * rsqrtf(((((volatile float*)red_result_ptr_1)[0] / 0x1.8p+9f/*7.680000e+02*/) + 0x1.4f8b588e368f1p-17f/*1.000000e-05*/))) * x_ptr_1[2]) + x_ptr_2[2]);
    y_ptr[3] = ((((x_ptr[3] - x0_mean_value_ptr[0]) * rsqrtf(((((volatile float*)red_result_ptr_1)[0] / 0x1.8p+9f/*7.680000e+02*/) + 0x1.4f8b588e368f1p-17f/*1.000000e-05*/))) * x_ptr_1[3]) + x_ptr_2[3]);
    *(float4*)(T_layer_norm_ptr + ((((int)blockIdx.x) * 768) + (((int)threadIdx.x) * 4))) = *(float4*)(y_ptr + 0);
  }
}

