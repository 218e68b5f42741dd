"""CPU kernels without reuse: computations that share their leading axes run row by row, and a row stays in cache.

Not here: what has reuse (`cpu_tiles`); which computations share a kernel (`plan`).
Start at `emit.emit_rows`.
"""
