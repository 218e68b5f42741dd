"""The device functions of `ir.device_sync` in OpenCL C, so that blocks of a launch wait for each other on a CPU.

Not here: their CUDA text, which comes with their calls.
"""

from __future__ import annotations

from tvm_ext.ir.device_sync import ORDERS, SyncOrders

_LOOKS = 1 << 14
"""How often a block looks whether all others have come: OpenCL knows no sleep. Assumed."""

_OPENCL = """
inline int tvm_ext_wait_until(__global int* counter, int epoch, int per_run, int count) {{
  const uint target = (uint)epoch * (uint)per_run + (uint)count;
  for (;;) {{
    const uint seen = (uint)atomic_load_explicit(
        (volatile __global atomic_int*)counter, memory_order_{wait}, memory_scope_device);
    if ((int)(seen - target) >= 0) return 0;
  }}
}}
inline int tvm_ext_arrive(__global int* counter, int amount) {{
  atomic_fetch_add_explicit(
      (volatile __global atomic_int*)counter, amount, memory_order_{arrive}, memory_scope_device);
  return 0;
}}
inline int tvm_ext_take(__global int* ticket, int epoch, int per_run) {{
  const uint taken = (uint)atomic_fetch_add_explicit(
      (volatile __global atomic_int*)ticket, 1, memory_order_relaxed, memory_scope_device);
  return (int)(taken - (uint)epoch * (uint)per_run);
}}
inline int tvm_ext_settle(__global int* arrived, int epoch, int blocks) {{
  const uint undecided = 2u * (uint)epoch;
  volatile __global atomic_int* const chosen = (volatile __global atomic_int*)(arrived + 1);
  uint found = undecided + 1u;
  uint seen = (uint)atomic_load_explicit(chosen, memory_order_relaxed, memory_scope_device);
  const uint before = (uint)atomic_fetch_add_explicit(
      (volatile __global atomic_int*)arrived, 1, memory_order_relaxed, memory_scope_device);
  if (before + 1u != ((uint)epoch + 1u) * (uint)blocks) {{
    for (int looks = {looks}; looks > 0 && (int)(seen - undecided) <= 0; --looks)
      seen = (uint)atomic_load_explicit(chosen, memory_order_relaxed, memory_scope_device);
    found = undecided + 2u;
  }}
  if ((int)(seen - undecided) <= 0) {{
    int old = (int)seen;
    const bool is_ours = atomic_compare_exchange_strong_explicit(
        chosen, &old, (int)found, memory_order_relaxed, memory_order_relaxed, memory_scope_device);
    seen = is_ours ? found : (uint)old;
  }}
  return (int)(seen & 1u);
}}
inline int tvm_ext_read_epoch(__global int* cell) {{ return *cell; }}
inline int tvm_ext_end_run(__global int* cell) {{ *cell = (int)((uint)*cell + 1u); return 0; }}
"""


def opencl_text(orders: SyncOrders = ORDERS) -> str:
    """The functions in OpenCL C, to stand before a kernel's source; compile with ``-cl-std=CL2.0`` or later."""
    return _OPENCL.format(wait=orders.wait, arrive=orders.arrive, looks=_LOOKS)
