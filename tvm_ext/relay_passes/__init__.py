"""Passes over Relax graphs, one a file; `onnx` makes the graphs, `layout` chooses how their tensors lie in memory.

Not here: what is done with single kernels (`tir_passes`); the order of the passes (`pass_pipeline.py`).
Start at `fuse_operators.FuseOperators`.
"""
