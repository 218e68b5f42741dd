"""A PrimFunc read as plain data: its stages, their tensor expressions, and rewritings that keep their meaning.

Not here: hardware, tiles and costs; how TensorIR is written (`ir`).
Start at `stages.read_operator`.
"""
