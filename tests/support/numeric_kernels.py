"""The errors of whole kernels (softmax, norms, reductions) by type, in ulps of the largest exact result of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .numerics import LONG, TYPES, Array, Node, errors_ulp, run_nodes

ROWS, CHANNELS, LENGTH = 16, 4, 192
AXIS = (np.array([-1]),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """An ONNX operator over the last axis, the first word of its name in `KERNELS`.

    ``reference`` is its formula, of rows between ``low`` and ``high``; ``ulps`` is what it may err by in each type, in
    the order of `TYPES`. ``parameters`` are ones and zeros, one for each ``channels`` or for each element of a row.
    """

    reference: Callable[[Array], Array]
    ulps: tuple[float, float, float, float]
    low: float = -8.0
    high: float = 8.0
    parameters: str = ""
    channels: bool = False
    constants: Sequence[Array] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def node(self, name: str, dtype: np.dtype) -> Node:
        """The operator of random rows in ``dtype``."""
        shape = (ROWS, CHANNELS, LENGTH) if self.channels else (ROWS, LENGTH)
        x = np.random.default_rng(0).uniform(self.low, self.high, shape).astype(dtype)
        count = CHANNELS if self.channels else LENGTH
        constants = [*(np.full(count, int(digit)).astype(dtype) for digit in self.parameters), *self.constants]
        return Node(operator=name.split()[0], values=x, constants=constants, attributes=self.attributes)


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _log_sum_exp(x: Array) -> Array:
    largest = x.max(-1, keepdims=True)
    return np.asarray(largest + np.log(np.exp(x - largest).sum(-1, keepdims=True)))


def _normalized(x: Array) -> Array:
    return _over_deviation(x - x.mean(-1, keepdims=True))


def _over_deviation(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + LONG(np.float32(1e-5))))


def _by_groups(x: Array) -> Array:
    return _normalized(x.reshape(ROWS, 2, -1)).reshape(x.shape)


def _length(x: Array) -> Array:
    return np.asarray(np.sqrt((x * x).sum(-1, keepdims=True)))


KERNELS: dict[str, Kernel] = {
    "Softmax": Kernel(reference=_softmax, ulps=(6, 3, 3, 6)),
    "LogSoftmax": Kernel(reference=lambda x: x - _log_sum_exp(x), ulps=(3, 2, 2, 3)),
    "ReduceLogSumExp": Kernel(reference=_log_sum_exp, constants=AXIS, ulps=(2, 2, 2, 2)),
    "ReduceMean": Kernel(reference=lambda x: x.mean(-1, keepdims=True), constants=AXIS, low=1, ulps=(4, 1, 1, 4)),
    "ReduceMean of 600": Kernel(
        reference=lambda x: x.mean(-1, keepdims=True), constants=AXIS, low=600, high=601, ulps=(4, 1, 1, 4)
    ),
    "ReduceL2 of 600": Kernel(reference=_length, constants=AXIS, low=600, high=601, ulps=(4, 1, 1, 4)),
    "LpNormalization of 600": Kernel(reference=lambda x: x / _length(x), low=600, high=601, ulps=(4, 1, 1, 4)),
    "CumSum": Kernel(reference=lambda x: x.cumsum(-1), constants=(np.asarray(-1),), low=1, ulps=(16, 1, 1, 16)),
    "LayerNormalization": Kernel(reference=_normalized, parameters="10", ulps=(4, 1, 1, 4)),
    "RMSNormalization": Kernel(reference=_over_deviation, parameters="1", ulps=(4, 1, 1, 4)),
    "InstanceNormalization": Kernel(reference=_normalized, parameters="10", channels=True, ulps=(4, 1, 1, 4)),
    "InstanceNormalization of 600": Kernel(
        reference=_normalized, parameters="10", channels=True, low=600, high=700, ulps=(40, 1, 1, 40)
    ),
    "GroupNormalization": Kernel(
        reference=_by_groups, parameters="10", channels=True, attributes={"num_groups": 2}, ulps=(4, 2, 2, 4)
    ),
}


def kernel_errors(dtype: str) -> dict[str, float]:
    """The largest error of each kernel in one type."""
    nodes = {name: kernel.node(name, TYPES[dtype]) for name, kernel in KERNELS.items()}
    results = zip(KERNELS.items(), nodes.values(), run_nodes([*nodes.values()]), strict=True)
    return {name: _error(kernel, node.values, actual) for (name, kernel), node, actual in results}


def _error(kernel: Kernel, values: Array, actual: Array) -> float:
    expected = kernel.reference(values.astype(LONG))
    return float(np.max(errors_ulp(actual, expected, np.abs(expected).max(-1, keepdims=True))))


def table_of_kernels() -> str:
    """The Markdown table of kernels in docs/numerics.md."""
    header = f"| kernel | elements | {' | '.join(TYPES)} | allowed |\n" + "|---" * 7 + "|"
    by_type = [kernel_errors(dtype) for dtype in TYPES]
    rows = []
    for name, kernel in KERNELS.items():
        errors = (f"{errors[name]:.1f}" for errors in by_type)
        allowed = ", ".join(f"{ulps:g}" for ulps in kernel.ulps)
        rows.append(f"| {name} | {kernel.low:g} to {kernel.high:g} | {' | '.join(errors)} | {allowed} |")
    return "\n".join([header, *rows])
