"""What the attributes of LSTM, GRU and RNN say, and whether a node's operands fit them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_ext.records.recurrent import ACTIVATIONS, GATES, ActivationName, CellKind, GateActivation

from .context import Pen

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_DEFAULTS: Mapping[CellKind, tuple[ActivationName, ...]] = {
    "lstm": ("Sigmoid", "Tanh", "Tanh"),
    "gru": ("Sigmoid", "Tanh"),
    "rnn": ("Tanh",),
}
# GateActivation -> the defaults of alpha and beta, None where it has none. ONNX refers to the operators of these names;
# those without defaults there have ONNX Runtime's.
_PARAMETERS: Mapping[ActivationName, tuple[float | None, float | None]] = {
    "Affine": (1.0, 0.0),
    "Elu": (1.0, None),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01, None),
    "Relu": (None, None),
    "ScaledTanh": (1.0, 1.0),
    "Sigmoid": (None, None),
    "Softplus": (None, None),
    "Softsign": (None, None),
    "Tanh": (None, None),
    "ThresholdedRelu": (1.0, None),
}
_BY_LOWER_NAME = {name.lower(): name for name in _PARAMETERS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The attributes of a node. ``is_reverse``: of each direction; ``activations``: of all directions in a row."""

    kind: CellKind
    is_reverse: tuple[bool, ...]
    activations: tuple[GateActivation, ...]
    clip: float | None
    is_batch_first: bool
    input_forget: bool
    linear_before_reset: bool


def settings_of(kind: CellKind, attributes: Mapping[str, Any]) -> Settings:
    """Reads attributes as protobuf has them, strings being bytes. Raises ValueError, which says what ONNX has not."""
    direction = _text(attributes.get("direction", "forward"))
    if direction not in _DIRECTIONS:
        raise ValueError(f"has the direction '{direction}', which is none of {', '.join(_DIRECTIONS)}")
    is_reverse = _DIRECTIONS[direction]
    names = [_text(name) for name in attributes.get("activations", ())] or [*_DEFAULTS[kind]] * len(is_reverse)
    if len(names) != len(is_reverse) * ACTIVATIONS[kind]:
        raise ValueError(f"names {len(names)} activations, where it has {len(is_reverse) * ACTIVATIONS[kind]}")
    alphas, betas = attributes.get("activation_alpha", ()), attributes.get("activation_beta", ())
    clip = float(attributes["clip"]) if "clip" in attributes else None
    if clip is not None and not clip >= 0:  # NaN is not either
        raise ValueError(f"clips at {clip}")
    return Settings(
        kind=kind,
        is_reverse=is_reverse,
        activations=tuple(_activations(names, iter(alphas), iter(betas))),
        clip=clip,
        is_batch_first=bool(attributes.get("layout", 0)),
        input_forget=kind == "lstm" and bool(attributes.get("input_forget", 0)),
        linear_before_reset=kind == "gru" and bool(attributes.get("linear_before_reset", 0)),
    )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _activations(names: Sequence[str], alphas: Iterator[float], betas: Iterator[float]) -> Iterator[GateActivation]:
    """Those that have a parameter take the next value given, as ONNX Runtime has it; where none is left, the default.

    Worked example: LeakyRelu, Tanh, Affine with ``activation_alpha`` [0.1, 2] and ``activation_beta`` [3] are
    LeakyRelu(0.1), Tanh, Affine(2, 3).
    """
    for given in names:
        name = _BY_LOWER_NAME.get(given.lower())
        if name is None:
            raise ValueError(f"has the activation '{given}', which is none of {', '.join(_PARAMETERS)}")
        alpha, beta = _PARAMETERS[name]
        yield GateActivation(
            name=name,
            alpha=0.0 if alpha is None else float(next(alphas, alpha)),
            beta=0.0 if beta is None else float(next(betas, beta)),
        )


def check_recurrent(kind: CellKind, pen: Pen) -> None:
    """Raises ModelError where attributes or operands are not ONNX's, or a shape is not known."""
    try:
        settings = settings_of(kind, pen.options())
    except ValueError as error:
        raise pen.refusal(str(error), "compare the node with the definition of its operator") from error
    x = _input_shape(pen, bool(settings.is_batch_first))
    recurrent = pen.known_shape(pen.input[2])
    if len(x) != 3 or len(recurrent) != 3 or min(*x, *recurrent) < 1:
        raise pen.refusal(
            f"has the input {list(x)} and the recurrence {list(recurrent)}", "both have three axes, none empty"
        )
    _check_shapes(pen, _expected_shapes(settings, x, recurrent[2]))
    declared = pen.integer("hidden_size", recurrent[2])
    if declared != recurrent[2]:
        raise pen.refusal(f"has the hidden_size {declared} and {recurrent[2]} columns of R", "they are the same")


def _input_shape(pen: Pen, is_batch_first: bool) -> tuple[int, ...]:
    """The shape of X, with 1 for a number of steps that is counted at run time; no other extent may be open."""
    name, steps = pen.x, 1 if is_batch_first else 0
    rank = pen.rank(name)
    if rank is None:
        return pen.known_shape(name)
    extents = [pen.extent(name, axis) for axis in range(rank)]
    open_axes = [axis for axis, extent in enumerate(extents) if extent is None and axis != steps]
    if open_axes:
        what = "number of features" if 2 in open_axes else "batch"
        raise pen.refusal(
            f"needs the shape of '{name}': its {what} (axis {open_axes[-1]}) is open",
            f"bind it with shape={{...}}; only the number of steps (axis {steps}) may stay open",
        )
    return tuple(1 if extent is None else extent for extent in extents)


def _expected_shapes(settings: Settings, x: tuple[int, ...], hidden: int) -> dict[int, tuple[int, ...]]:
    """Index of an operand -> its shape."""
    directions, columns = len(settings.is_reverse), GATES[settings.kind] * hidden
    batch = x[0] if settings.is_batch_first else x[1]
    state = (batch, directions, hidden) if settings.is_batch_first else (directions, batch, hidden)
    shapes: dict[int, tuple[int, ...]] = {
        1: (directions, columns, x[2]),
        2: (directions, columns, hidden),
        3: (directions, 2 * columns),
        4: (batch,),
        5: state,
    }
    return shapes if settings.kind != "lstm" else {**shapes, 6: state, 7: (directions, 3 * hidden)}


def _check_shapes(pen: Pen, expected: Mapping[int, tuple[int, ...]]) -> None:
    for index, shape in expected.items():
        name = pen.operand(index)
        if name and pen.known_shape(name) != shape:
            given = list(pen.known_shape(name))
            raise pen.refusal(f"has '{name}' of shape {given}, not {list(shape)}", "export operands that fit")


def unrolled_calls(pen: Pen) -> int:
    """How many calls of a cell a recurrent node becomes: one for each step and direction; 0 for any other node."""
    if pen.op_type not in ("GRU", "LSTM", "RNN"):
        return 0
    x, recurrent = pen.shape(pen.x), pen.shape(pen.input[2])
    return x[pen.flag("layout")] * recurrent[0] if x and recurrent else 0
