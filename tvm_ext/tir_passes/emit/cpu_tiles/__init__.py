"""CPU kernels with reuse: register tiles under blocked loops, packed inputs, epilogues in registers.

Not here: the tiles' sizes (`roller`); windows over single planes (`cpu_windows`).
Start at `emit.emit_tile_kernel`.
"""
