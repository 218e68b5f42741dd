"""Random operators against float64 NumPy: ``python -m tests.support.random_operators --count 2000 --seed 0``.

Each case is a frozen record (`record`) drawn from a seed and a number (`draw`), built through the front door
(`relax_module`, `check`) and compared with an independent reference (`reference`); see ``docs/testing.md``.
"""
