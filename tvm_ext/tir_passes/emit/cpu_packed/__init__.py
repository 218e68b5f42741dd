"""CPU kernels of products by weights of four bits, whose left operand is rounded to bytes block by block.

Not here: which products may be rounded (`relay_passes/settle_packed.py`); tiles and time (`cost/packed_products.py`).
Start at `emit.emit_packed_product`.
"""
