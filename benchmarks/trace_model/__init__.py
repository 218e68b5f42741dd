"""A cost model for stock TVM's MetaSchedule that is taught an analytical model of its candidates' loops.

`learner` is what `tune_tir` and `tune_relax` take; `loop_nests` reads a schedule's loops, `loop_nest_time` times them.
"""
