"""Measuring and choosing among candidates: the store of measurements, spaces of tiles, searches, tuning a model.

`database.py` is the file that many processes write to, `database_files.py` its exports and merges, `store.py` what a
build consults; `cpu_space.py` and `spaces.py` have the candidates of a kernel, `cost_model.py`
learns, `search.py` chooses what to try. `measure.py` builds, checks and times candidates (`builders.py`, `runners.py`,
`turns.py`, in processes of `kernel_worker.py`). `session.py` tunes a model; `standings.py` compares what
was measured side by side, `choose.py` decides. Not here: construction, which needs no measurement
(`tir_passes/roller`); the models' equations (`cost`); the profiler of CUTLASS's templates (`byoc_cutlass/profiler.py`).
"""
