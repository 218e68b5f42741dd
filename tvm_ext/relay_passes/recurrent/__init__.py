"""Recurrent layers as graphs: one function per cell, called once per step, or in a loop of as many as there will be.

Not here: what ONNX's operators say of them (`onnx/operators/recurrent.py`).
Start at `unroll.unrolled`; `loop.looped` where the number of steps is open.
"""
