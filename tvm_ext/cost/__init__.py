"""Models of time: what Roller's tiles and ALCOP's pipelines cost on a device, by arithmetic alone.

Not here: the device's numbers (`devices`); who asks and decides (`tir_passes`).
Start at `perf_model.PerfModel`.
"""
