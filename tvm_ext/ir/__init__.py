"""Writing TensorIR: small constructors for loops, threads, bulk copies and floats, which emitters and passes share.

Not here: reading it (`analysis`); anything that knows operators or tiles.
Start at `build_ir.loop`.
"""
