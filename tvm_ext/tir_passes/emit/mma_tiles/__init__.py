"""Tensor-core kernels: implicit GEMMs through shared memory and fragments.

Not here: products on vector units (`simt_tiles`); their model and their candidates (`roller`).
Start at `emit.emit_mma_tile`.
"""
