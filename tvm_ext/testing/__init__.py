"""What tests, benchmarks and examples share: models, seeded inputs, the timing core of `tvm-ext bench`, and `verify`.

>>> from tvm_ext.testing import verify
>>> print(verify(func, "nvidia-a100"))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .verification import Verification, verify

__all__ = ["Verification", "verify"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when first used: the interpreter is no part of timing or models
        return getattr(importlib.import_module(".verification", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
