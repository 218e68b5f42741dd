"""CPU kernels of attention: both products and the softmax between them, block of keys by block of keys.

Not here: which attentions there are (`relay_passes/fuse_attention.py`); the sizes of blocks (`cost/attention_time.py`).
Start at `emit.emit_attention`.
"""
