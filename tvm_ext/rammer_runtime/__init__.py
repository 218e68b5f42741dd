"""The runtime that co-schedules rTasks of many operators on a CPU (Rammer): a schedule goes in as data, a table.

Start at `table.ExecutionTable`. The native part (``csrc/rammer/``) reads and walks it. `legacy`
makes rKernels of plain CUDA kernels.

Not here: who makes the schedule, and running one library, kernel after kernel (`runtime`).
"""
