// Function: main_kernel
__kernel void main_kernel(__global float* restrict T_softmax_norm_ptr, __global float* restrict x0_ptr);
__kernel void main_kernel(__global float* restrict T_softmax_norm_ptr, __global float* restrict x0_ptr) {
  float T_softmax_maxelem_part_ptr[1];
  float x_ptr[4];
  __local float red_buf0_ptr[64];
  float T_softmax_expsum_part_ptr[1];
  float T_softmax_exp_row_ptr[4];
  __local float red_buf0_ptr_1[64];
  float y_ptr[4];
  T_softmax_maxelem_part_ptr[0] = -3.402823e+38f;
  int cse_v1 = (((convert_int(get_group_id(0))) * 200) + ((convert_int(get_local_id(0))) * 4));
  if ((convert_int(get_local_id(0))) < 50) {
    vstore4(vload4(0, x0_ptr + (((convert_int(get_group_id(0))) * 200) + ((convert_int(get_local_id(0))) * 4))), 0, x_ptr + 0);
    float condval;
    if (T_softmax_maxelem_part_ptr[0] <= INFINITY) {
      float condval_1;
      if (x_ptr[0] < T_softmax_maxelem_part_ptr[0]) {
        condval_1 = T_softmax_maxelem_part_ptr[0];
      } else {
        condval_1 = x_ptr[0];
      }
      condval = condval_1;
    } else {
      condval = T_softmax_maxelem_part_ptr[0];
    }
    T_softmax_maxelem_part_ptr[0] = condval;
    float condval_2;
    if (T_softmax_maxelem_part_ptr[0] <= INFINITY) {
      float condval_3;
      if (x_ptr[1] < T_softmax_maxelem_part_ptr[0]) {
        condval_3 = T_softmax_maxelem_part_ptr[0];
      } else {
        condval_3 = x_ptr[1];
      }
      condval_2 = condval_3;
    } else {
      condval_2 = T_softmax_maxelem_part_ptr[0];
    }
    T_softmax_maxelem_part_ptr[0] = condval_2;
    float condval_4;
    if (T_softmax_maxelem_part_ptr[0] <= INFINITY) {
      float condval_5;
      if (x_ptr[2] < T_softmax_maxelem_part_ptr[0]) {
        condval_5 = T_softmax_maxelem_part_ptr[0];
      } else {
        condval_5 = x_ptr[2];
      }
      condval_4 = condval_5;
    } else {
      condval_4 = T_softmax_maxelem_part_ptr[0];
    }
    T_softmax_maxelem_part_ptr[0] = condval_4;
    float condval_6;
    if (T_softmax_maxelem_part_ptr[0] <= INFINITY) {
      float condval_7;
      if (x_ptr[3] < T_softmax_maxelem_part_ptr[0]) {
        condval_7 = T_softmax_maxelem_part_ptr[0];
      } else {
        condval_7 = x_ptr[3];
      }
      condval_6 = condval_7;
    } else {
      condval_6 = T_softmax_maxelem_part_ptr[0];
    }
    T_softmax_maxelem_part_ptr[0] = condval_6;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = T_softmax_maxelem_part_ptr[0];
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 32) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = select(((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], select(((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 32)], ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], (convert_int((((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 32)] < ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))])))), (convert_int((((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] <= INFINITY))));
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 16) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = select(((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], select(((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 16)], ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], (convert_int((((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 16)] < ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))])))), (convert_int((((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] <= INFINITY))));
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 8) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = select(((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], select(((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 8)], ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], (convert_int((((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 8)] < ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))])))), (convert_int((((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] <= INFINITY))));
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 4) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = select(((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], select(((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 4)], ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], (convert_int((((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 4)] < ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))])))), (convert_int((((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] <= INFINITY))));
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 2) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = select(((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], select(((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 2)], ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], (convert_int((((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 2)] < ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))])))), (convert_int((((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] <= INFINITY))));
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 1) {
    ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] = select(((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], select(((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 1)], ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))], (convert_int((((volatile __local float*)red_buf0_ptr)[((convert_int(get_local_id(0))) + 1)] < ((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))])))), (convert_int((((volatile __local float*)red_buf0_ptr)[(convert_int(get_local_id(0)))] <= INFINITY))));
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  T_softmax_expsum_part_ptr[0] = 0.000000e+00f;
  if ((convert_int(get_local_id(0))) < 50) {
    T_softmax_exp_row_ptr[0] = exp((x_ptr[0] - ((volatile __local float*)red_buf0_ptr)[0]));
    T_softmax_exp_row_ptr[1] = exp((x_ptr[1] - ((volatile __local float*)red_buf0_ptr)[0]));
    T_softmax_exp_row_ptr[2] = exp((x_ptr[2] - ((volatile __local float*)red_buf0_ptr)[0]));
    T_softmax_exp_row_ptr[3] = exp((x_ptr[3] - ((volatile __local float*)red_buf0_ptr)[0]));
    T_softmax_expsum_part_ptr[0] = (T_softmax_expsum_part_ptr[0] + T_softmax_exp_row_ptr[0]);
    T_softmax_expsum_part_ptr[0] = (T_softmax_expsum_part_ptr[0] + T_softmax_exp_row_ptr[1]);
    T_softmax_expsum_part_ptr[0] = (T_softmax_expsum_part_ptr[0] + T_softmax_exp_row_ptr[2]);
    T_softmax_expsum_part_ptr[0] = (T_softmax_expsum_part_ptr[0] + T_softmax_exp_row_ptr[3]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  ((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] = T_softmax_expsum_part_ptr[0];
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 32) {
    ((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr_1)[((convert_int(get_local_id(0))) + 32)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 16) {
    ((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr_1)[((convert_int(get_local_id(0))) + 16)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 8) {
    ((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr_1)[((convert_int(get_local_id(0))) + 8)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 4) {
    ((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr_1)[((convert_int(get_local_id(0))) + 4)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 2) {
    ((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr_1)[((convert_int(get_local_id(0))) + 2)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 1) {
    ((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] = (((volatile __local float*)red_buf0_ptr_1)[(convert_int(get_local_id(0)))] + ((volatile __local float*)red_buf0_ptr_1)[((convert_int(get_local_id(0))) + 1)]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if ((convert_int(get_local_id(0))) < 50) {
    y_ptr[0] = (T_softmax_exp_row_ptr[0] * (1.000000e+00f / ((volatile __local float*)red_buf0_ptr_1)[0]));
    y_ptr[1] = (T_softmax_exp_row_ptr[1] * (1.000000e+00f / ((volatile __local float*)red_buf0_ptr_1)[0]));
    y_ptr[2] = (T_softmax_exp_row_ptr[2] * (1.000000e+00f / ((volatile __local float*)red_buf0_ptr_1)[0]));
    y_ptr[3] = (T_softmax_exp_row_ptr[3] * (1.000000e+00f / ((volatile __local float*)red_buf0_ptr_1)[0]));
    vstore4(vload4(0, y_ptr + 0), 0, T_softmax_norm_ptr + (((convert_int(get_group_id(0))) * 200) + ((convert_int(get_local_id(0))) * 4)));
  }
}

