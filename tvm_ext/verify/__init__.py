"""Whether GPU kernels are right, without a GPU: the interpreter (`simt`), threads as loops.

>>> from tvm_ext.verify import verify
>>> print(verify(func, "nvidia-a100"))  # doctest: +SKIP

Not here: kernels and mutants to test all that with, and OpenCL on the CPU (`tests/support/` of the repository).
Start at `verification.verify`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .verification import Verification, verify

__all__ = ["Verification", "verify"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when first used: who takes a part takes no more
        return getattr(importlib.import_module(".verification", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
