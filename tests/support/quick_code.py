"""Machine code that is made quickly: LLVM optimises nothing, which took a third of the time of tests that build."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ACTIVE: list[bool] = []


@contextmanager
def unoptimised() -> Iterator[None]:
    """Meanwhile code for CPUs is made at LLVM's level 0, but for targets that name a level themselves."""
    import tvm

    building: Any = sys.modules["tvm.tirx.build"]  # as an attribute, it is the function of that name
    generate = building.codegen_build

    def generate_quickly(mod: tvm.IRModule, target: tvm.target.Target) -> Any:
        if mod.functions and str(target.kind.name) == "llvm" and "opt-level" not in target.attrs:
            target = tvm.target.Target({**target.export(), "opt-level": 0})
        return generate(mod, target)

    building.codegen_build = generate_quickly
    _ACTIVE.append(True)
    try:
        yield
    finally:
        building.codegen_build = generate
        _ACTIVE.pop()


def is_active() -> bool:
    """Whether code is made quickly now."""
    return bool(_ACTIVE)
