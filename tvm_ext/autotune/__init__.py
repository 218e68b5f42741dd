"""Measuring and choosing among candidates: no part of it is in this version.

Not here: construction, which needs no measurement (`tir_passes/roller`); what the models predict (`cost`).
"""
