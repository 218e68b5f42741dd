"""Vertices and exchange plans for Graphcore's IPU, from rPrograms (Roller §3.2, §4). Start at `emit.py: emit_for_ipu`.

`stages.py` reads an operator as stages, `superstep_tiles.py` fits rPrograms to tiles with memories of their own,
`vertex.py` writes a stage's C++ class, `emit.py` deals the vertices to tiles and plans the exchange. Nothing here needs
Graphcore's SDK; the emulator of the tests runs the result.
"""
