"""Writing TensorIR: small constructors for loops, threads, vectors, epilogues and matrix units, which emitters share.

Not here: reading it (`analysis`); how a kind of kernel is divided (`tir_passes/emit`).
Start at `build_ir.loop`.
"""
