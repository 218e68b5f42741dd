"""Passes over TensorIR: kernels constructed, pipelined, guarded; a folder for each step of that.

Not here: graphs (`relay_passes`); the order of the passes (`pass_pipeline.py`).
Start at `construct_kernels.ConstructKernels`.
"""
