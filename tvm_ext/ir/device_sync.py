"""How blocks of one launch hand work to each other: six device functions, their calls and their text.

A persistent kernel walks a schedule: its blocks wait for counters that other blocks raise. TensorIR has no words for
that, so kernels call these functions, whose CUDA text comes with the call, and whose meaning `verify.simt` knows. A
counter is an int32 of a state tensor that is never reset: in run r of a kernel it rises from ``r * per_run`` to
``(r + 1) * per_run``, modulo 2^32. All of that arithmetic is inside the functions, unsigned: TensorIR's int32 must not
overflow.

Each is called by one thread of a block; what the others did before is handed on with it where a barrier lies between,
and they know what it learnt behind the next barrier:

    if thread == 0: wait_until(...)         # all of the block is behind the wait
    barrier; the rTask; barrier
    if thread == 0: arrive(...)             # all of the rTask is before the arrival

The kernel's pointers must not be ``__restrict__``: what no call takes, such a pointer says, no call changes, and its
loads may be moved across a wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx

from .build_ir import cast_to

WAIT, ARRIVE, TAKE, SETTLE = "tvm_ext_wait_until", "tvm_ext_arrive", "tvm_ext_take", "tvm_ext_settle"
READ_EPOCH, END_RUN = "tvm_ext_read_epoch", "tvm_ext_end_run"
CALL = "tirx.cuda.func_call"
"""Stock TVM's call of a function whose text is the last argument: (name, arguments ..., text)."""

ALL = (WAIT, ARRIVE, TAKE, SETTLE, READ_EPOCH, END_RUN)
WRITING = (ARRIVE, TAKE, SETTLE, END_RUN)
"""Functions that change the memory which their first argument points to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOrders:
    """The memory orders of the functions, at the scope of the device; weaker ones are for tests, which must notice.

    The load of a wait acquires what the counter's arrivals released. Who takes a ticket learns nothing by it: what
    tickets mean is in tables that no kernel writes.
    """

    wait: Literal["acquire", "relaxed"] = "acquire"
    arrive: Literal["release", "relaxed"] = "release"


ORDERS = SyncOrders()


# --- calls ----------------------------------------------------------------------------------------------------------
def wait_until(state: Buffer, counter: Expr, epoch: Expr, per_run: Expr, count: Expr) -> Stmt:
    """Return once ``state[counter]``, which rises by ``per_run`` in a run, has risen by ``count`` in run ``epoch``."""
    return tirx.Evaluate(_call(WAIT, state, counter, epoch, per_run, count))


def arrive(state: Buffer, counter: Expr, amount: Expr) -> Stmt:
    """Raise ``state[counter]``: what lies before is there for those whom it lets go on."""
    return tirx.Evaluate(_call(ARRIVE, state, counter, amount))


def take(state: Buffer, ticket: Expr, epoch: Expr, per_run: Expr) -> Expr:
    """The next number of run ``epoch``, from 0 (int32); each is given once. A run must take ``per_run`` of them.

    Where blocks leave at the first number that stands for no work, that is the work and one for each block.
    """
    return _call(TAKE, state, ticket, epoch, per_run)


def settle(state: Buffer, arrived: Expr, epoch: Expr, blocks: Expr) -> Expr:
    """1 where all ``blocks`` of the launch are on the device in run ``epoch``, else 0 (int32): the same for all.

    Each block calls it once, before it waits for another. ``state[arrived]`` counts them, and the word behind it says
    what was found: the last to come finds all there; who has looked for long enough and seen no answer finds that they
    are not. So blocks that have no room, on a device of fewer units than the schedule was made for or beside another
    kernel, are noticed and not waited for. Behind a run that ended so, blocks look for a shorter time.
    """
    return _call(SETTLE, state, arrived, epoch, blocks)


def read_epoch(state: Buffer, cell: Expr) -> Expr:
    """The number of the run (int32), from a cell that belongs to the block alone."""
    return _call(READ_EPOCH, state, cell)


def end_run(state: Buffer, cell: Expr) -> Stmt:
    """The block's last word: its cell counts on, for the next launch to find."""
    return tirx.Evaluate(_call(END_RUN, state, cell))


def _call(name: str, state: Buffer, cell: Expr, *numbers: Expr) -> Expr:
    pointer = tirx.address_of(tirx.BufferLoad(state, [cell]))
    return tirx.call_intrin(
        "int32", CALL, name, pointer, *(cast_to(number, "int32") for number in numbers), cuda_texts()[name]
    )


# --- CUDA -----------------------------------------------------------------------------------------------------------
WAIT_LIMIT = "TVM_EXT_WAIT_LIMIT_NS"
"""A wait of more nanoseconds says what it waits for and ends the kernel by a trap; 0 (``-D``): it waits for ever."""

_LIMIT_NS = 30_000_000_000
"""Far beyond any run, for a wait lasts no longer than its launch. What has come already is never timed."""

_LONGEST_PAUSE_NS = 256  # a choice: short against an rTask, and polls of many blocks leave the L2 cache free

_HEAD = "static __device__ __forceinline__ int"

_WAIT_TEXT = """
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "blocks that wait for each other need sm_70: before, the threads of a warp do not go on by themselves"
#endif
#ifndef {limit}
#define {limit} {limit_ns}
#endif
static __device__ __noinline__ void tvm_ext_waited_too_long(int* counter, unsigned target, unsigned seen) {{
  printf("block %d waits for the counter at %p to reach %u: it is at %u\\n",
         (int)blockIdx.x, (void*)counter, target, seen);
  __trap();
}}
{head} tvm_ext_wait_until(int* counter, int epoch, int per_run, int count) {{
  const unsigned target = (unsigned)epoch * (unsigned)per_run + (unsigned)count;
  unsigned seen, pause = 8;
  asm volatile("ld.{wait}.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  if ((int)(seen - target) >= 0) return 0;
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  for (;;) {{
    __nanosleep(pause);
    if (pause < {pause}) pause *= 2;
    asm volatile("ld.{wait}.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    if ((int)(seen - target) >= 0) return 0;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if ({limit} && now - begin > (unsigned long long)({limit})) {{
      tvm_ext_waited_too_long(counter, target, seen);
      __builtin_unreachable();
    }}
  }}
}}
"""

_ARRIVE_TEXT = """
{head} tvm_ext_arrive(int* counter, int amount) {{
  asm volatile("red.{arrive}.gpu.add.u32 [%0], %1;" : : "l"(counter), "r"(amount) : "memory");
  return 0;
}}
"""

_TAKE_TEXT = """
{head} tvm_ext_take(int* ticket, int epoch, int per_run) {{
  unsigned taken;
  asm volatile("atom.relaxed.gpu.add.u32 %0, [%1], 1;" : "=r"(taken) : "l"(ticket) : "memory");
  return (int)(taken - (unsigned)epoch * (unsigned)per_run);
}}
"""

_LOOKS, _FEW_LOOKS = 512, 16
"""How often a block looks whether all others have come, and behind a run in which they did not.

Between looks it asks to sleep for 64 ns, which PTX lets be anything from none to twice that: some 30 us, and 1 us.
Assumed, not measured, is that blocks of one launch begin within that time where they have room; where they do not,
tickets are as right.
"""

_SETTLE_TEXT = """
{head} tvm_ext_settle(int* arrived, int epoch, int blocks) {{
  const unsigned undecided = 2u * (unsigned)epoch;
  unsigned before, seen, found = undecided + 1u;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(arrived + 1) : "memory");
  asm volatile("atom.relaxed.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
  if (before + 1u != ((unsigned)epoch + 1u) * (unsigned)blocks) {{
    for (int looks = seen == undecided ? {few} : {looks}; looks > 0 && (int)(seen - undecided) <= 0; --looks) {{
      __nanosleep(64);
      asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(arrived + 1) : "memory");
    }}
    found = undecided + 2u;
  }}
  if ((int)(seen - undecided) <= 0) {{
    unsigned old;
    asm volatile("atom.relaxed.gpu.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old) : "l"(arrived + 1), "r"(seen), "r"(found) : "memory");
    seen = old == seen ? found : old;
  }}
  return (int)(seen & 1u);
}}
"""

_READ_EPOCH_TEXT = """
{head} tvm_ext_read_epoch(int* cell) {{ return *cell; }}
"""

_END_RUN_TEXT = """
{head} tvm_ext_end_run(int* cell) {{ *cell = (int)((unsigned)*cell + 1u); return 0; }}
"""


def cuda_texts(orders: SyncOrders = ORDERS) -> Mapping[str, str]:
    """The functions in CUDA C++ by name, for nvcc and NVRTC, from sm_70 on.

    The orders are said in PTX: ``volatile`` orders nothing, and C++'s atomics need headers that NVRTC does not have.
    Source: PTX ISA, "Memory Consistency Model": ``red.release.gpu`` behind ``bar.sync`` releases what all threads of
    the block wrote, ``ld.acquire.gpu`` before ``bar.sync`` acquires it for all of them (causality is transitive).
    """
    words = {
        "head": _HEAD, "limit": WAIT_LIMIT, "limit_ns": f"{_LIMIT_NS}ull",
        "pause": _LONGEST_PAUSE_NS, "wait": orders.wait, "arrive": orders.arrive,
        "looks": _LOOKS, "few": _FEW_LOOKS,
    }  # fmt: skip
    texts = (_WAIT_TEXT, _ARRIVE_TEXT, _TAKE_TEXT, _SETTLE_TEXT, _READ_EPOCH_TEXT, _END_RUN_TEXT)
    return {name: text.format(**words) for name, text in zip(ALL, texts, strict=True)}
