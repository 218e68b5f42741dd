"""Tuning a model: what ties spaces, emitters and measuring together. Start with `model.py`.

`kernels.py` reads which kernels of a model have a choice of tiles, and makes the job that measures one; `model.py` runs
a session over them. Not here: what to try next and what to adopt (`autotune`), building and timing jobs
(`autotune/measure.py`), the kernels themselves (`tir_passes`).
"""
