"""From lowered kernels to machine code: LLVM, CUDA, ROCm and OpenCL, and what their compilers say of it.

Not here: loading and running it (`runtime`).
Start at `code_generation.Compiler`.
"""
