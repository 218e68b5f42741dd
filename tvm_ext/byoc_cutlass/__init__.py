"""CUTLASS kernels for parts of the graph (Bolt): which parts. There is no code generator in this version.

Not here: tensor-core kernels of our own (`tir_passes/emit/mma_tiles`); the pass that cuts the graph
(`relay_passes/partition_cutlass.py`); what an epilogue saves (`cost/epilogue_traffic.py`).
Start at `patterns.regions_of`, then `support.problem_of`.
"""
