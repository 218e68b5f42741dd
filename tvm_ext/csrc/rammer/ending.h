// Other threads while Python ends.
//
// A thread that comes back to an interpreter which has begun to end is unwound by it (up to Python 3.13), through frames
// of tvm-ffi that cannot be unwound: the process would abort. So threads that run tables, or parallel loops on our
// threads, are held in here from then on, and any other stays where it cannot be unwound.
#ifndef TVM_EXT_RAMMER_ENDING_H_
#define TVM_EXT_RAMMER_ENDING_H_

namespace tvm_ext {
namespace rammer {

// For the time of one run of a table or a loop, from before it starts until it has ended. Holds the thread where Python
// ends.
class RunScope {
 public:
  RunScope();
  ~RunScope();
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;
};

// To be called when Python is about to end, without its lock: returns when other threads that run tables or loops are
// held, or after 1 s. They are let go where Python has not begun to end 2 s later.
void HoldOtherThreads();

}  // namespace rammer
}  // namespace tvm_ext

#endif  // TVM_EXT_RAMMER_ENDING_H_
