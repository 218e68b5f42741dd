"""ALCOP (MLSys 2023): automatic multi-stage, multi-level load-compute pipelining, as passes for any GPU schedule.

Not here: what a depth costs (`cost.pipeline_model`); a build's own wishes (`tir_passes.pipeline_kernels`).
Start at `passes.AutoPipeline`.
"""
