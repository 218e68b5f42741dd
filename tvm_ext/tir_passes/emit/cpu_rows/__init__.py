"""CPU kernels without reuse: stages that share their leading axes run row by row, and a row stays in cache.

Not here: what has reuse (`cpu_tiles`); which stages share a kernel (`plan`).
Start at `emit.emit_rows`.
"""
