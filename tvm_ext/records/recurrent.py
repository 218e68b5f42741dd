"""One step of a recurrent layer: what its cell computes, and in which order the cell's function takes its operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CELL = "tvm_ext.cell"
"""Function attribute, of the graph's function and later of the PrimFunc: the `RecurrentCell` it computes, as JSON."""

CellKind = Literal["lstm", "gru", "rnn"]
ActivationName = Literal[
    "Affine", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "ScaledTanh", "Sigmoid", "Softplus", "Softsign", "Tanh",
    "ThresholdedRelu",
]  # fmt: skip

GATES: dict[CellKind, int] = {"lstm": 4, "gru": 3, "rnn": 1}
"""Gates of a cell, in ONNX's order: input, output, forget, cell (lstm); update, reset, hidden (gru)."""
ACTIVATIONS: dict[CellKind, int] = {"lstm": 3, "gru": 2, "rnn": 1}
"""Activations of a cell: of its gates; of the cell or hidden gate; of the cell state before the output (lstm)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateActivation:
    """A function of one number; ``alpha`` and ``beta`` mean what ONNX says for that name, and nothing for others."""

    name: ActivationName
    alpha: float = 0.0
    beta: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOperand:
    """A parameter or result of a cell's function."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentCell:
    """What one call of a cell's function computes: one step of one layer in one direction, for a whole batch.

    With x the operand ``inputs``, h and c the states, and everything by gate (``[g]``: columns g * hidden_size to
    (g + 1) * hidden_size), f, g, h' the activations, what f and g are applied to being clipped to [-clip, clip] (ONNX
    says so of h' as well, but ONNX Runtime does not do it):

    lstm
        s = x + h R; i = f(s[0] + P[0] c); forget = f(s[2] + P[2] c), or 1 - i with ``input_forget``;
        c' = forget c + i g(s[3]); result h = f(s[1] + P[1] c') h'(c'), and c'.
    gru
        z = f(x[0] + h R[0]); r = f(x[1] + h R[1]); n = g(x[2] + (r h) R[2]), or, with ``linear_before_reset``,
        n = g(x[2] + r (h R[2] + recurrent_bias)); result h = (1 - z) n + z h.
    rnn
        result h = f(x + h R).

    With ``is_masked`` a state whose row of ``active`` is false stays what it was.
    """

    kind: CellKind
    batch_size: int
    hidden_size: int
    dtype: str
    activations: tuple[GateActivation, ...]
    clip: float | None = None
    input_forget: bool = False
    linear_before_reset: bool = False
    has_peepholes: bool = False
    is_masked: bool = False

    def __post_init__(self) -> None:
        assert self.batch_size >= 1 and self.hidden_size >= 1
        assert len(self.activations) == ACTIVATIONS[self.kind]
        assert self.clip is None or self.clip >= 0

    @property
    def gate_columns(self) -> int:
        """Columns of ``inputs``: all gates of all hidden units."""
        return GATES[self.kind] * self.hidden_size

    @property
    def operands(self) -> tuple[CellOperand, ...]:
        """The parameters of the function, in order.

        ``inputs`` is a step of X W^T with the biases; ``recurrent`` is R transposed, of a gru without
        ``linear_before_reset`` in two parts, for its hidden gate multiplies something else.
        """
        units, state = self.hidden_size, (self.batch_size, self.hidden_size)
        parts = {"inputs": (self.batch_size, self.gate_columns), "hidden": state}
        if self.kind == "lstm":
            parts["cell"] = state
        if self.kind == "gru" and not self.linear_before_reset:
            parts |= {"recurrent_gates": (units, 2 * units), "recurrent_hidden": (units, units)}
        else:
            parts["recurrent"] = (units, self.gate_columns)
        if self.kind == "gru" and self.linear_before_reset:
            parts["recurrent_bias"] = (1, units)
        if self.has_peepholes:
            parts["peepholes"] = (1, 3 * units)
        named = [CellOperand(name=name, shape=shape, dtype=self.dtype) for name, shape in parts.items()]
        if self.is_masked:
            named.append(CellOperand(name="active", shape=(self.batch_size, 1), dtype="bool"))
        return tuple(named)

    @property
    def results(self) -> tuple[CellOperand, ...]:
        """What the function returns: one tensor, or a tuple of two."""
        names = ("hidden", "cell") if self.kind == "lstm" else ("hidden",)
        shape = (self.batch_size, self.hidden_size)
        return tuple(CellOperand(name=name, shape=shape, dtype=self.dtype) for name in names)

    @property
    def flops(self) -> float:
        """Of the products alone, a multiply-add counting as two."""
        return 2.0 * self.batch_size * self.hidden_size * self.gate_columns

    def __str__(self) -> str:
        """``lstm of 256 units, batch 1``."""
        return f"{self.kind} of {self.hidden_size} units, batch {self.batch_size}"
