"""Passes over TensorIR and the construction of their schedules."""
