"""Channels padded to copies of 16 bytes, where the model says that it pays (Bolt §3.2.3).

Not here: what a product costs at which alignment (`cost/alignment_model.py`); layouts (`relay_passes/layout`).
Start at `pad_alignment.PadAlignment`.
"""
