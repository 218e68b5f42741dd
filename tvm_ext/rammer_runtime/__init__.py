"""The runtime that co-schedules rTasks of many operators (Rammer): no part of it is in this version."""
