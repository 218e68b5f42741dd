"""Chains of products as one GPU kernel, whose values between two products never leave the chip (Bolt, §3.1).

Not here: which products are a chain (`plan.gpu_chain`); its tiles and their model (`cost.gpu_chain`).
Start at `emit.emit_chain`.
"""
