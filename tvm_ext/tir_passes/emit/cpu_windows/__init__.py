"""CPU kernels of windows over single planes: depthwise convolution and pooling, a band of one plane per task.

Not here: convolutions that reduce over channels (`cpu_tiles`).
Start at `emit.emit_window`; `blocked.emit_blocked_window` is for channels in blocks.
"""
