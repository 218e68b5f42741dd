"""What has nothing to do with tensors: files, limited processes, limits, rounding up, the kernel cache.

Not here: what knows operators or devices.
Start at `kernel_cache.KernelCache`.
"""
