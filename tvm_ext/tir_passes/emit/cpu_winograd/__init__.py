"""CPU kernels of 3x3 convolutions in Winograd's form: transformed tiles, products and outputs in one task's caches.

Not here: the tiles' sizes (`cost.winograd_time`). Start at `emit.emit_winograd`.
"""
