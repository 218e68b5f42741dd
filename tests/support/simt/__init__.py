"""Kernels that are right, and mutants of them that are not, to test the interpreter with.

Not here: the interpreter (`tvm_ext.verify.simt`).
Start at `good_kernels.simt_kernels`.
"""
