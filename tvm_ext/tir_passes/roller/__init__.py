"""Roller (paper §3): rTiles, alignment rules, and the construction of rPrograms.

Not here: emitting them (`emit`); the performance model (`cost`) and the devices it asks (`devices`).
Start at `construct.construct`.
"""
