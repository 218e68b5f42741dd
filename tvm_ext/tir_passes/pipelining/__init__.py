"""ALCOP (MLSys 2023): automatic multi-stage, multi-level load-compute pipelining, as passes for any GPU schedule."""
