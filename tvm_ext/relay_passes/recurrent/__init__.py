"""Recurrent layers as graphs: one function per cell, called once per step.

Not here: what ONNX's operators say of them (`onnx/operators/recurrent.py`).
Start at `unroll.unrolled`.
"""
