"""The kinds of kernels, a file each: what one recognises, what can be chosen of it, how it is written and described.

Not here: how kernels are written (`emit`), which computations share one (`plan`).
Start at `kernel_kind.KernelKind`, then `registry`.
"""
