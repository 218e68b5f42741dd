"""Random LSTM, GRU and RNN nodes, and what they compute: ONNX's equations in float64, written independently of TVM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
ACTIVATIONS_OF = {"LSTM": 3, "GRU": 2, "RNN": 1}
DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
FUNCTIONS: dict[str, Callable[[Array, float, float], Array]] = {
    "Affine": lambda x, a, b: a * x + b,
    "Elu": lambda x, a, b: np.where(x >= 0, x, a * (np.exp(np.minimum(x, 0)) - 1)),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "LeakyRelu": lambda x, a, b: np.where(x >= 0, x, a * x),
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "Sigmoid": lambda x, a, b: 1 / (1 + np.exp(-x)),
    "Softplus": lambda x, a, b: np.logaddexp(0, x),
    "Softsign": lambda x, a, b: x / (1 + np.abs(x)),
    "Tanh": lambda x, a, b: np.tanh(x),
    "ThresholdedRelu": lambda x, a, b: np.where(x >= a, x, 0),
}
TAKES_ALPHA = ("Affine", "Elu", "HardSigmoid", "LeakyRelu", "ScaledTanh", "ThresholdedRelu")
TAKES_BETA = ("Affine", "HardSigmoid", "ScaledTanh")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentNode:
    """One node: extents, attributes (of the node, and what is given of operands), all drawn."""

    kind: str
    steps: int
    batch: int
    features: int
    hidden: int
    direction: str = "forward"
    activations: tuple[str, ...] = ()
    alphas: tuple[float, ...] = ()
    betas: tuple[float, ...] = ()
    clip: float | None = None
    layout: int = 0
    coupled: int = 0
    linear_before_reset: int = 0
    lengths: tuple[int, ...] = ()
    has_bias: bool = True
    has_state: bool = False
    has_cell: bool = False
    has_peepholes: bool = False
    are_weights_inputs: bool = False

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def results(self) -> tuple[str, ...]:
        return ("y", "y_h", "y_c") if self.kind == "LSTM" else ("y", "y_h")


LSTM = RecurrentNode(kind="LSTM", steps=5, batch=2, features=3, hidden=5)
FORMS = {
    "lstm of everything": dataclasses.replace(
        LSTM, direction="bidirectional", clip=0.5, layout=1, lengths=(5, 2), has_state=True, has_cell=True,
        has_peepholes=True,
    ),
    "coupled lstm, run-time weights": dataclasses.replace(LSTM, coupled=1, are_weights_inputs=True, has_bias=False),
    "gru": RecurrentNode(kind="GRU", steps=5, batch=1, features=3, hidden=20, lengths=(3,)),
    "reverse gru, linear before reset": RecurrentNode(
        kind="GRU", steps=5, batch=2, features=3, hidden=5, direction="reverse", linear_before_reset=1, has_state=True
    ),
    "rnn": RecurrentNode(kind="RNN", steps=5, batch=2, features=2, hidden=3, direction="bidirectional", layout=1),
}  # fmt: skip
"""Nodes that together have all that a node can have but activations, by name."""


def drawn(seed: int, *, for_onnx_runtime: bool = False) -> RecurrentNode:
    """A node that follows from ``seed``; ``for_onnx_runtime``: only what that implements."""
    random = np.random.default_rng([seed, 14])
    kind = str(random.choice(list(GATES)))
    steps, batch = int(random.integers(1, 7)), int(random.integers(1, 4))
    direction = str(random.choice(["forward", "reverse", "bidirectional"]))
    count = ACTIVATIONS_OF[kind] * (2 if direction == "bidirectional" else 1)
    activations = tuple(str(name) for name in random.choice(list(FUNCTIONS), count)) if random.random() < 0.5 else ()

    def values(takers: Sequence[str]) -> tuple[float, ...]:
        wanted = sum(name in takers for name in activations)
        return tuple(float(np.float32(round(float(value), 3))) for value in random.uniform(0.1, 0.9, wanted))

    maybe = [bool(flag) for flag in random.random(9) < 0.4]
    return RecurrentNode(
        kind=kind,
        steps=steps,
        batch=batch,
        features=int(random.integers(1, 9)),
        hidden=int(random.integers(1, 20)),
        direction=direction,
        activations=activations,
        alphas=values(TAKES_ALPHA),
        betas=values(TAKES_BETA),
        clip=float(np.float32(0.7)) if maybe[0] else None,
        layout=int(maybe[1] and not for_onnx_runtime),
        coupled=int(maybe[2] and kind == "LSTM"),
        linear_before_reset=int(maybe[3] and kind == "GRU"),
        lengths=tuple(int(length) for length in random.integers(1, steps + 1, batch)) if maybe[4] else (),
        has_bias=not maybe[5],
        has_state=maybe[6],
        has_cell=maybe[7] and kind == "LSTM",
        has_peepholes=maybe[8] and kind == "LSTM",
        are_weights_inputs=bool(random.random() < 0.2),
    )


def operands(node: RecurrentNode, seed: int = 0) -> dict[str, Array]:
    """The values of the node's operands by name, those that it has not left out."""
    random = np.random.default_rng([seed, 27])
    rows, d, h = GATES[node.kind] * node.hidden, node.directions, node.hidden
    swap = (lambda shape: (shape[1], shape[0], *shape[2:])) if node.layout else (lambda shape: shape)

    def uniform(*shape: int) -> Array:
        return random.uniform(-1, 1, shape).astype(np.float32)

    values = {"x": uniform(*swap((node.steps, node.batch, node.features)))}
    values |= {"w": uniform(d, rows, node.features), "r": uniform(d, rows, h)}
    if node.has_bias:
        values["b"] = uniform(d, 2 * rows)
    if node.lengths:
        values["lengths"] = np.asarray(node.lengths, np.int32)
    if node.has_state:
        values["h0"] = uniform(*swap((d, node.batch, h)))
    if node.has_cell:
        values["c0"] = uniform(*swap((d, node.batch, h)))
    if node.has_peepholes:
        values["p"] = uniform(d, 3 * h)
    return values


def attributes_of(node: RecurrentNode) -> dict[str, Any]:
    """Those of the node, without defaults."""
    attributes: dict[str, Any] = {"hidden_size": node.hidden, "direction": node.direction}
    attributes |= {"activations": list(node.activations)} if node.activations else {}
    attributes |= {"activation_alpha": list(node.alphas)} if node.alphas else {}
    attributes |= {"activation_beta": list(node.betas)} if node.betas else {}
    attributes |= {"clip": node.clip} if node.clip is not None else {}
    for name, value in (
        ("layout", node.layout),
        ("input_forget", node.coupled),
        ("linear_before_reset", node.linear_before_reset),
    ):
        attributes |= {name: value} if value else {}
    return attributes


def model_of(node: RecurrentNode, values: Mapping[str, Array]) -> onnx.ModelProto:
    """The node as a model whose weights are constants, or inputs."""
    order = ["x", "w", "r", "b", "lengths", "h0", *(["c0", "p"] if node.kind == "LSTM" else [])]
    inputs = [name if name in values else "" for name in order]
    made = helper.make_node(node.kind, inputs, node.results, **attributes_of(node))
    given = list(values) if node.are_weights_inputs else [name for name in values if name in ("x", "lengths")]
    graph = helper.make_graph(
        [made],
        "recurrent",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(values[name].dtype), list(values[name].shape)
            )
            for name in given
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.results],
        [numpy_helper.from_array(value, name) for name, value in values.items() if name not in given],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def expected(node: RecurrentNode, given: Mapping[str, Array]) -> list[Array]:
    """The node's results by ONNX's equations, sequence by sequence."""
    values = {name: value.astype(np.float64) for name, value in given.items()}
    swapped = ("x", "h0", "c0") if node.layout else ()
    values |= {name: values[name].swapaxes(0, 1) for name in swapped if name in values}
    y = np.zeros((node.steps, node.directions, node.batch, node.hidden))
    states = [np.zeros((node.directions, node.batch, node.hidden)) for _ in node.results[1:]]
    for d in range(node.directions):
        is_reverse = node.direction == "reverse" or d == 1
        for n in range(node.batch):
            length = node.lengths[n] if node.lengths else node.steps
            step = _Cell(node, values, d)
            h, c = (values[key][d, n] if key in values else np.zeros(node.hidden) for key in ("h0", "c0"))
            for t in reversed(range(length)) if is_reverse else range(length):
                h, c = step(values["x"][t, n], h, c)
                y[t, d, n] = h
            for state, value in zip(states, (h, c), strict=False):
                state[d, n] = value
    if node.layout:
        return [y.transpose(2, 0, 1, 3), *[state.swapaxes(0, 1) for state in states]]
    return [y, *states]


class _Cell:
    """One step of one direction on one sequence."""

    def __init__(self, node: RecurrentNode, values: Mapping[str, Array], d: int) -> None:
        self.node, rows = node, GATES[node.kind] * node.hidden
        zeros = np.zeros(2 * rows)
        self.w, self.r = values["w"][d], values["r"][d]
        both = values["b"][d] if "b" in values else zeros
        self.wb, self.rb = both[:rows], both[rows:]
        self.p = values["p"][d] if "p" in values else np.zeros(3 * node.hidden)
        count = ACTIVATIONS_OF[node.kind]
        self.functions = list(_functions(node))[d * count : (d + 1) * count]

    def __call__(self, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        return {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}[self.node.kind](x, h, c)

    def _of(self, index: int, x: Array) -> Array:
        limit = np.inf if self.node.clip is None else self.node.clip
        return self.functions[index](np.clip(x, -limit, limit))

    def _lstm(self, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        i, o, f, g = np.split(self.w @ x + self.r @ h + self.wb + self.rb, 4)
        pi, po, pf = np.split(self.p, 3)
        i = self._of(0, i + pi * c)
        f = 1 - i if self.node.coupled else self._of(0, f + pf * c)
        c = f * c + i * self._of(1, g)
        return self._of(0, o + po * c) * self.functions[2](c), c  # unclipped, as in ONNX Runtime

    def _gru(self, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        wz, wr, wh = np.split(self.w @ x + self.wb, 3)
        (rz, rr, rh), (bz, br, bh) = np.split(self.r, 3), np.split(self.rb, 3)
        z, r = self._of(0, wz + rz @ h + bz), self._of(0, wr + rr @ h + br)
        inner = r * (rh @ h + bh) if self.node.linear_before_reset else rh @ (r * h) + bh
        return (1 - z) * self._of(1, wh + inner) + z * h, c

    def _rnn(self, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        return self._of(0, self.w @ x + self.r @ h + self.wb + self.rb), c


def _functions(node: RecurrentNode) -> Iterator[Callable[[Array], Array]]:
    """One per gate group and direction; those that take a parameter take the next one."""
    alphas, betas = iter(node.alphas), iter(node.betas)
    for name in node.activations or DEFAULTS[node.kind] * node.directions:
        alpha = next(alphas) if name in TAKES_ALPHA else 0.0
        beta = next(betas) if name in TAKES_BETA else 0.0
        yield lambda x, name=name, alpha=alpha, beta=beta: FUNCTIONS[name](x, alpha, beta)  # type: ignore[misc]
