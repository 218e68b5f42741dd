"""Who runs which rTask when: the policies of Rammer (paper §3.3), behind the two calls Append and Wait.

Not here: what schedules are (`records.rtasks`), how long they take (`cost.schedule_simulator`), how a graph becomes one
of rTasks. Start at `policies.schedule`.
"""
