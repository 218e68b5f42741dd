"""The runtime that co-schedules rTasks of many operators (Rammer): no part of it is in this version.

Not here: running one library, kernel after kernel (`runtime`).
"""
