"""CUTLASS kernels for graph partitions (Bolt): no part of it is in this version.

Not here: tensor-core kernels of our own (`tir_passes/emit/mma_tiles`).
"""
