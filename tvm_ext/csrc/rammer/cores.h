// Which cores this process may use.
//
// A thread's mask need not say: owners bind theirs, the first one included (benchmarks do, and OpenMP's OMP_PROC_BIND).
// So a thread of ours, the witness, which nobody binds by itself, has the mask that the first thread had when this
// library was loaded, and sleeps. Who binds all threads of the process (taskset -a, a container's cpuset) binds it too.
#ifndef TVM_EXT_RAMMER_CORES_H_
#define TVM_EXT_RAMMER_CORES_H_

#include <sched.h>

namespace tvm_ext {
namespace rammer {

cpu_set_t AllowedCores();

// How many these are; at least 1.
int UsableCores();

// To be called in the child of a fork, which has none of its parent's threads.
void ForgetWitness();

}  // namespace rammer
}  // namespace tvm_ext

#endif  // TVM_EXT_RAMMER_CORES_H_
