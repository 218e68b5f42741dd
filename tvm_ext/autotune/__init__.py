"""Measuring and choosing among candidates. In this version: the store of measurements.

`database.py` is the file that many processes write to, `database_files.py` its exports and merges, `store.py` what a
build consults. Not here: construction, which needs no measurement (`tir_passes/roller`); what the models predict
(`cost`); the profiler of CUTLASS's templates (`byoc_cutlass/profiler.py`), which is given a store.
"""
