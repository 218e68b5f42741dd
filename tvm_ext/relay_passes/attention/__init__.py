"""Recognising attention in a graph of operators: the operands read where they lie, the steps between the products.

Not here: the pass (`fuse_attention`); what one kernel makes of it (`tir_passes/emit/cpu_attention`).
Start at `recognise.attentions_of`.
"""
