#ifndef TVM_EXT_LEGACY_TASK
#define TVM_EXT_LEGACY_TASK
struct tvm_ext_task {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
  unsigned meeting;  // how many threads meet: whole warps
  bool votes;        // whether some may leave before the others
};
#ifdef __CUDACC__
static __device__ __forceinline__ void tvm_ext_meet(unsigned count) {
  asm volatile("barrier.sync 1, %0;" : : "r"(count) : "memory");
}
static __device__ __forceinline__ bool tvm_ext_vote(bool leaves, unsigned count) {
  unsigned all;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.red.and.pred q, 1, %2, p; selp.u32 %0, 1, 0, q; }"
      : "=r"(all) : "r"((unsigned)leaves), "r"(count) : "memory");
  return all != 0;
}
#endif
static __device__ __forceinline__ void tvm_ext_sync(const tvm_ext_task& task) {
  if (task.votes) tvm_ext_vote(false, task.meeting);
  else tvm_ext_meet(task.meeting);
}
static __device__ __forceinline__ void tvm_ext_leave(const tvm_ext_task& task) {
  if (task.votes) while (!tvm_ext_vote(true, task.meeting)) {}
}
template <typename T> static __device__ __forceinline__ T tvm_ext_plain_load(const T* from) { return *from; }
#endif
