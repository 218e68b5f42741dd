"""ALCOP (MLSys 2023): automatic multi-stage, multi-level load-compute pipelining, for any GPU schedule.

Not here: what a depth costs (`cost.pipeline_model`).
Start at `route.py`; the passes for a user's kernels are in `passes.py`.
"""
