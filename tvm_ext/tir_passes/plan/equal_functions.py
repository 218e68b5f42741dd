"""Remembers kernels by the function that they were made of, so that equal operators are constructed once a build."""

from __future__ import annotations

from dataclasses import replace

from tvm_ext._tvm import PrimFunc, structural_equal, structural_hash
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json, to_json


class EqualFunctions:
    """Kernels by unscheduled function; functions are equal up to their names and those of their variables."""

    def __init__(self) -> None:
        self._made: dict[int, list[tuple[PrimFunc, PrimFunc]]] = {}  # by structural hash: (unscheduled, kernel)

    def find(self, func: PrimFunc, name: str) -> PrimFunc | None:
        """The kernel of a function equal to ``func``, for operator ``name``; None where there is none yet."""
        alike = self._made.get(structural_hash(func), [])
        kernel = next((kernel for other, kernel in alike if structural_equal(func, other)), None)
        if kernel is None:
            return None
        choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
        return kernel.with_attr(CHOICE, to_json(replace(choice, operator=name)))

    def remember(self, func: PrimFunc, kernel: PrimFunc) -> None:
        self._made.setdefault(structural_hash(func), []).append((func, kernel))
