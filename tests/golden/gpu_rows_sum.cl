// Function: main_kernel
__kernel void main_kernel(__global float* restrict x0_ptr, __global float* restrict x0_red_parts_ptr);
__kernel void main_kernel_1(__global float* restrict x0_red_ptr, __global float* restrict x0_red_parts_ptr);
__kernel void main_kernel(__global float* restrict x0_ptr, __global float* restrict x0_red_parts_ptr) {
  float x0_red_part_ptr[1];
  float x_ptr[4];
  __local float red_buf0_ptr[1024];
  x0_red_part_ptr[0] = 0.000000e+00f;
  int cse_v2 = (((convert_int(get_group_id(0))) * 20480) + ((convert_int(get_local_id(0))) * 4));
  vstore4(vload4(0, x0_ptr + (((convert_int(get_group_id(0))) * 20480) + ((convert_int(get_local_id(0))) * 4))), 0, x_ptr + 0);
  x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[0]);
  x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[1]);
  x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[2]);
  x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[3]);
  int cse_v1 = ((convert_int(get_group_id(0))) * 256);
  if ((((convert_int(get_group_id(0))) * 256) + (((convert_int(get_local_id(0))) + 1024) / 20)) < 13125) {
    vstore4(vload4(0, x0_ptr + ((((convert_int(get_group_id(0))) * 20480) + ((convert_int(get_local_id(0))) * 4)) + 4096)), 0, x_ptr + 0);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[0]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[1]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[2]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[3]);
  }
  if ((((convert_int(get_group_id(0))) * 256) + (((convert_int(get_local_id(0))) + 2048) / 20)) < 13125) {
    vstore4(vload4(0, x0_ptr + ((((convert_int(get_group_id(0))) * 20480) + ((convert_int(get_local_id(0))) * 4)) + 8192)), 0, x_ptr + 0);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[0]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[1]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[2]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[3]);
  }
  if ((((convert_int(get_group_id(0))) * 256) + (((convert_int(get_local_id(0))) + 3072) / 20)) < 13125) {
    vstore4(vload4(0, x0_ptr + ((((convert_int(get_group_id(0))) * 20480) + ((convert_int(get_local_id(0))) * 4)) + 12288)), 0, x_ptr + 0);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[0]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[1]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[2]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[3]);
  }
  if ((((convert_int(get_group_id(0))) * 256) + (((convert_int(get_local_id(0))) + 4096) / 20)) < 13125) {
    vstore4(vload4(0, x0_ptr + ((((convert_int(get_group_id(0))) * 20480) + ((convert_int(get_local_id(0))) * 4)) + 16384)), 0, x_ptr + 0);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[0]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[1]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[2]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[3]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = x0_red_part_ptr[0];
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 512) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 512)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 256) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 256)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 128) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 128)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 64) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 64)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 32) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 32)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 16) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 16)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 8) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 8)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 4) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 4)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 2) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 2)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 1) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 1)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) == 0) {
    x0_red_parts_ptr[(convert_int(get_group_id(0)))] = ((volatile __local float*)red_buf0_ptr)[0];
  }
}

// Function: main_kernel_1
__kernel void main_kernel(__global float* restrict x0_ptr, __global float* restrict x0_red_parts_ptr);
__kernel void main_kernel_1(__global float* restrict x0_red_ptr, __global float* restrict x0_red_parts_ptr);
__kernel void main_kernel_1(__global float* restrict x0_red_ptr, __global float* restrict x0_red_parts_ptr) {
  float x0_red_part_ptr[1];
  float x_ptr[4];
  __local float red_buf0_ptr[16];
  x0_red_part_ptr[0] = 0.000000e+00f;
  if ((convert_int(get_local_id(0))) < 13) {
    vstore4(vload4(0, x0_red_parts_ptr + ((convert_int(get_local_id(0))) * 4)), 0, x_ptr + 0);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[0]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[1]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[2]);
    x0_red_part_ptr[0] = (x0_red_part_ptr[0] + x_ptr[3]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = x0_red_part_ptr[0];
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 8) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 8)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 4) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 4)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 2) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 2)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 1) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 1)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) == 0) {
    x0_red_ptr[0] = ((volatile __local float*)red_buf0_ptr)[0];
  }
}

