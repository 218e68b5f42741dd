"""A PrimFunc read as plain data: its computations, their tensor expressions, and rewritings that keep their meaning.

Not here: hardware, tiles and costs; how TensorIR is written (`ir`).
Start at `computations.read_operator`.
"""
