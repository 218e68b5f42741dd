"""Constants that several builds have in common, kept once: the variants of a model for several shapes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar

from tvm_ext._tvm import Tensor

from .tensors import array_over

LEAST_BYTES = 4096
"""Smaller constants are not looked for: a page holds many. A choice."""


class ConstantStore:
    """Constants on the CPU by their type, shape and bytes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...], bytes], Tensor] = {}

    def __len__(self) -> int:
        return len(self._known)

    def shared(self, constant: Tensor) -> Tensor:
        """``constant``, or the one that equals it and came first."""
        values = array_over(constant)
        if values.nbytes < LEAST_BYTES:
            return constant
        digest = hashlib.blake2b(values.reshape(-1).view("uint8").data, digest_size=20).digest()
        return self._known.setdefault((str(constant.dtype), values.shape, digest), constant)


_CURRENT: ContextVar[ConstantStore | None] = ContextVar("constant store", default=None)


@contextlib.contextmanager
def sharing(store: ConstantStore) -> Iterator[None]:
    """Builds of this thread take constants from ``store`` that are in it, and add the others."""
    token = _CURRENT.set(store)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def shared(constant: Tensor) -> Tensor:
    """What a build under `sharing` takes for ``constant``; without it the constant itself."""
    store = _CURRENT.get()
    return constant if store is None else store.shared(constant)
