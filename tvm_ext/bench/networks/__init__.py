"""The built-in networks, written node by node with random or packaged weights.

Not here: which of them have a name on the command line (`bench.models`).
Start at `graph.GraphWriter`.
"""
