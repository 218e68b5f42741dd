"""A target for what is only compared with."""

from __future__ import annotations

from tvm_ext._tvm import Target

UNOPTIMISED = Target({"kind": "llvm", "opt-level": 0})
"""This machine's CPU by LLVM without its optimisations, which take two thirds of a small module's compilation."""
