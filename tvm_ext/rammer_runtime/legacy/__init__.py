"""Plain CUDA kernels, as text, become rKernels that a persistent kernel calls (Rammer, paper §4.1.4).

Start at `convert.convert_kernel`. Not here: kernels that this package makes, which are TensorIR.
"""
