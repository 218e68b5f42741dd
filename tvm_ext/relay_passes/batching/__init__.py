"""Proves that a model treats each element of its batch by itself, so that a batch may be divided.

Here: `prove.batch_axes`, which walks a model imported at two sizes; `rules.py`, what each operator does to the batch;
`functions.py`, the same for functions in TensorIR. Not here: which sizes are built (`records/batching.py`), and the
dividing itself (`runtime/batches.py`). Start at `prove.batch_axes`.
"""
