"""CPU kernels of chains: a loop over panels of the result, in which each operator's own kernel runs after the other.

Not here: which operators form a chain and how large its panels are (`plan.chain`); the kernels themselves (`cpu_tiles`,
`cpu_rows`).
Start at `emit.emit_panels`.
"""
