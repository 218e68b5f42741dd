"""Measuring and choosing among candidates. In this version: the store of measurements, and models of whole spaces.

`database.py` is the file that many processes write to, `database_files.py` its exports and merges, `store.py` what a
build consults; `tile_space.py` has the candidates of a product, `analytical.py` predicts them all. Not here:
construction, which needs no measurement (`tir_passes/roller`); the models' equations (`cost`); the profiler of
CUTLASS's templates (`byoc_cutlass/profiler.py`), which is given a store.
"""
