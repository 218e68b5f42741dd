; How the threads and blocks of a kernel for AMD GPUs wait for each other: a block's barrier, and the six functions of
; ir/device_sync.py. The orders are those of LLVM's memory model for AMDGPU ("User Guide for AMDGPU Backend"): "agent" is
; the device, "workgroup" the block. TVM links this text into each module, and makes its functions inline.

declare void @llvm.amdgcn.s.barrier()
declare void @llvm.amdgcn.s.sleep(i32)
declare i64 @llvm.amdgcn.s.memrealtime()
declare void @llvm.trap()

; s_barrier orders no memory: from gfx90a on LLVM puts no s_waitcnt before it, unless a fence asks for one.
define i32 @tvm_ext_block_barrier() {
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  ret i32 0
}

; A wait of more than 3e9 ticks (30 s at 100 MHz) ends the kernel by a trap.
define i32 @tvm_ext_wait_until(ptr addrspace(1) %counter, i32 %epoch, i32 %per_run, i32 %count) {
entry:
  %before = mul i32 %epoch, %per_run
  %target = add i32 %before, %count
  %first = load atomic i32, ptr addrspace(1) %counter syncscope("agent") acquire, align 4
  %first_more = sub i32 %first, %target
  %there = icmp sge i32 %first_more, 0
  br i1 %there, label %done, label %wait
wait:
  %begin = call i64 @llvm.amdgcn.s.memrealtime()
  br label %look
look:
  call void @llvm.amdgcn.s.sleep(i32 2)
  %seen = load atomic i32, ptr addrspace(1) %counter syncscope("agent") acquire, align 4
  %more = sub i32 %seen, %target
  %reached = icmp sge i32 %more, 0
  br i1 %reached, label %done, label %clock
clock:
  %now = call i64 @llvm.amdgcn.s.memrealtime()
  %waited = sub i64 %now, %begin
  %late = icmp ugt i64 %waited, 3000000000
  br i1 %late, label %give_up, label %look
give_up:
  call void @llvm.trap()
  unreachable
done:
  ret i32 0
}

define i32 @tvm_ext_arrive(ptr addrspace(1) %counter, i32 %amount) {
  %old = atomicrmw add ptr addrspace(1) %counter, i32 %amount syncscope("agent") release, align 4
  ret i32 0
}

define i32 @tvm_ext_take(ptr addrspace(1) %ticket, i32 %epoch, i32 %per_run) {
  %taken = atomicrmw add ptr addrspace(1) %ticket, i32 1 syncscope("agent") monotonic, align 4
  %before = mul i32 %epoch, %per_run
  %number = sub i32 %taken, %before
  ret i32 %number
}

; 512 looks some 74 ns apart (128 cycles at 1.7 GHz), 16 behind a run in which not all blocks were there.
define i32 @tvm_ext_settle(ptr addrspace(1) %arrived, i32 %epoch, i32 %blocks) {
entry:
  %undecided = shl i32 %epoch, 1
  %all = add i32 %undecided, 1
  %not_all = add i32 %undecided, 2
  %answer = getelementptr i32, ptr addrspace(1) %arrived, i64 1
  %earlier = load atomic i32, ptr addrspace(1) %answer syncscope("agent") monotonic, align 4
  %before = atomicrmw add ptr addrspace(1) %arrived, i32 1 syncscope("agent") monotonic, align 4
  %number = add i32 %before, 1
  %runs = add i32 %epoch, 1
  %last = mul i32 %runs, %blocks
  %is_last = icmp eq i32 %number, %last
  br i1 %is_last, label %decide, label %begin
begin:
  %was_alone = icmp eq i32 %earlier, %undecided
  %looks = select i1 %was_alone, i32 16, i32 512
  br label %look
look:
  %left = phi i32 [ %looks, %begin ], [ %fewer, %again ]
  %seen = phi i32 [ %earlier, %begin ], [ %next, %again ]
  %ahead = sub i32 %seen, %undecided
  %is_open = icmp sle i32 %ahead, 0
  %may_look = icmp sgt i32 %left, 0
  %goes_on = and i1 %is_open, %may_look
  br i1 %goes_on, label %again, label %decide
again:
  call void @llvm.amdgcn.s.sleep(i32 2)
  %next = load atomic i32, ptr addrspace(1) %answer syncscope("agent") monotonic, align 4
  %fewer = sub i32 %left, 1
  br label %look
decide:
  %known = phi i32 [ %earlier, %entry ], [ %seen, %look ]
  %found = phi i32 [ %all, %entry ], [ %not_all, %look ]
  %beyond = sub i32 %known, %undecided
  %undone = icmp sle i32 %beyond, 0
  br i1 %undone, label %propose, label %done
propose:
  %pair = cmpxchg ptr addrspace(1) %answer, i32 %known, i32 %found syncscope("agent") monotonic monotonic
  %old = extractvalue { i32, i1 } %pair, 0
  %won = extractvalue { i32, i1 } %pair, 1
  %agreed = select i1 %won, i32 %found, i32 %old
  br label %done
done:
  %result = phi i32 [ %known, %decide ], [ %agreed, %propose ]
  %value = and i32 %result, 1
  ret i32 %value
}

define i32 @tvm_ext_read_epoch(ptr addrspace(1) %cell) {
  %epoch = load i32, ptr addrspace(1) %cell, align 4
  ret i32 %epoch
}

define i32 @tvm_ext_end_run(ptr addrspace(1) %cell) {
  %epoch = load i32, ptr addrspace(1) %cell, align 4
  %next = add i32 %epoch, 1
  store i32 %next, ptr addrspace(1) %cell, align 4
  ret i32 0
}
