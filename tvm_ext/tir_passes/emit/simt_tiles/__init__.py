"""GPU kernels with reuse on vector units: global memory to shared memory to registers.

Not here: tensor cores (`mma_tiles`); loading ahead (`pipelining`).
Start at `emit.emit_simt_tile`.
"""
