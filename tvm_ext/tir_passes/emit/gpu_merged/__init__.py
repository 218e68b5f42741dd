"""Kernels of many operators in one (Rammer, §4.1): bodies moved to a common launch, and the loop that runs them.

Start with `kernel.py`. Which blocks run what is data (`tables.py`); nothing here decides.
"""
