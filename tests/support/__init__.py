"""What only tests need, beside the package: kernels, random operators, mutants, a stub of a CUDA driver.

Not here: what `tvm-ext verify` and `tvm-ext bench` offer to users (`tvm_ext.verify`, `tvm_ext.bench`).
Run a part with `python -m tests.support.random_operators`, from the root of the repository.
"""
