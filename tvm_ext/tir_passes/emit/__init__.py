"""Kernels written as TensorIR, a folder for each kind; what no kind fits is scheduled by a stated fallback.

Not here: which kind an operator gets (`plan`), with which tiles (`roller`).
Start at `cpu_tiles.emit.emit_tile_kernel`.
"""
