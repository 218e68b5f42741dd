"""CUTLASS kernels for graph partitions (Bolt): no part of it is in this version."""
