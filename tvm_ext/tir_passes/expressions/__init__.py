"""Rewritings of a kernel's expressions, for what stock TVM or LLVM would make wrong, slow or exponential of them.

Not here: rewritings of computations, before there is a kernel (`analysis.computation_rewrites`).
Start at `exact_floats.keep_floats`.
"""
