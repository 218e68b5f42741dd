"""CPU kernels of recurrent cells: all sums of some units in registers, and what is made of them while they are there.

Not here: what a cell is (`plan/cell.py`); how it is divided (`cost/cell_time.py`). Start at `emit.emit_cell_step`.
"""
