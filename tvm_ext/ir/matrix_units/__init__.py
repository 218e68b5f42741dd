"""Products on matrix units: how factors are read, tiles in shared memory, fragments, and stores through an epilogue.

Not here: which block computes what (`tir_passes/emit/mma_tiles`); what a product is (`analysis.gemm_form`).
Start at `operand.read_operands`.
"""
