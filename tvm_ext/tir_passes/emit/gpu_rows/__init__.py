"""GPU kernels without reuse: threads sweep rows, and meet where a reduction needs all of a row.

Not here: what has reuse (`simt_tiles`, `mma_tiles`).
Start at `emit.emit_simt_rows`.
"""
