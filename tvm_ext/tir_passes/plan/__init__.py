"""Which computations of an operator share a kernel, and of which kind; what no kernel can do.

Not here: tiles (`roller`); loops (`emit`).
Start at `plan_kernels.plan`.
"""
