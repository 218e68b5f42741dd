"""A chain of products as one GPU kernel: each threadblock computes its rows of all products (Bolt, §3.1.1).

for block in blocks of rows:
  accumulators = A[block, :] . B0             # step by step through shared memory
  kept = epilogue(accumulators)               # rounded; registers or shared memory
  accumulators = kept . B1                    # B1 whole, or step by step
  C[block, :] = epilogue(accumulators)
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Buffer
from tvm_ext.cost.gpu_chain import ChainTile
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.simt_ir import SimtKernel, launch
from tvm_ext.support.arithmetic import ceil_div

from ...plan.gpu_chain import ChainGroup
from .mma import mma_block
from .parts import read_chain
from .simt import simt_block


def emit_chain(group: ChainGroup, tile: ChainTile, device: DeviceSpec, params: Sequence[Buffer]) -> SimtKernel:
    """The kernel of ``group`` in ``tile``, one of its own; ``params`` are the function's parameters.

    Raises IllegalRewrite where a product's value is not that of two tensors.
    """
    parts = read_chain(group, tile, device, params)
    make = mma_block if tile.units == "matrix units" else simt_block
    blocks = ceil_div(group.chain.rows, tile.rows)
    return SimtKernel(
        statements=(launch(blocks, tile.threads, lambda block, thread: make(parts, block, thread)),),
        threads=tile.threads,
        blocks=blocks,
        shared_bytes=tile.shared_bytes,
        register_count=tile.registers,
    )
