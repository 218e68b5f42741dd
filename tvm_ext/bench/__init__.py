"""What `tvm-ext bench` and the scripts of `benchmarks/` share: models, contenders, placement of threads, timing.

Not here: micro-benchmarks of a device (`devices`); scripts and results (`benchmarks/` of the repository).
Start at `compare.bench`.
"""
