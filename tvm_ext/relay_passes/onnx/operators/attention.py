"""Attention of the standard domain (operator sets 23 and up), written with products and a softmax.

The stock importer takes it for the operator of the same name in com.microsoft, whose operands are others; ONNX's own
definition by simpler operators computes masks from shapes at run time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from .context import FLOAT, Pen, rule

_MASK, _PAST_KEY, _PAST_VALUE, _VALID_LENGTHS = 3, 4, 5, 6  # places of inputs (ONNX, Attention)
_COMPARISONS = {">=": ("GreaterOrEqual", np.greater_equal), "<=": ("LessOrEqual", np.less_equal)}
_PRODUCT, _CAPPED, _BIASED, _PROBABILITIES = range(4)  # values of ``qk_matmul_output_mode`` (ONNX, Attention)


@dataclass(kw_only=True, slots=True)
class _Heads:
    """Queries, keys and values as tensors of (batch, heads, sequence, features), and what is known of them."""

    query: str
    key: str
    value: str
    query_heads: int
    key_heads: int
    features: int
    query_length: int
    key_length: int
    past_length: int
    is_flat: bool


@rule("Attention", replaces=True)
def _attention(pen: Pen) -> None:
    heads = _heads(pen)
    bias = _bias(pen, heads)
    product = _scaled_product(pen, heads)
    capped = _capped(pen, product)
    biased = capped if bias is None else pen.add("Add", capped, bias.name)
    probabilities = _softmax(pen, biased, bias)
    _present(pen, heads)
    _inspected(pen, {_PRODUCT: product, _CAPPED: capped, _BIASED: biased, _PROBABILITIES: probabilities})
    value = _repeated(pen, heads.value, heads)
    if heads.is_flat:
        rows = pen.add("Transpose", pen.add("MatMul", probabilities, value), perm=[0, 2, 1, 3])
        pen.add("Reshape", rows, pen.integers(0, 0, -1), out=pen.out)
    else:
        pen.add("MatMul", probabilities, value, out=pen.out)


def _heads(pen: Pen) -> _Heads:
    """The operands with one axis for the heads, the cached keys and values in front."""
    query, key, value = (pen.operand(index) for index in range(3))
    shapes = [pen.known_shape(name) for name in (query, key, value)]
    is_flat = len(shapes[0]) == 3
    if is_flat:
        query_heads, key_heads = pen.integer("q_num_heads", 0), pen.integer("kv_num_heads", 0)
    else:
        query_heads, key_heads = shapes[0][1], shapes[1][1]
    if query_heads < 1 or key_heads < 1 or query_heads % key_heads:
        raise pen.refusal(f"has {query_heads} query and {key_heads} key heads", "the second must divide the first")
    if is_flat:
        query = _split_heads(pen, query, shapes[0][2], query_heads)
        key = _split_heads(pen, key, shapes[1][2], key_heads)
        value = _split_heads(pen, value, shapes[2][2], key_heads)
    past_key, past_value = pen.operand(_PAST_KEY), pen.operand(_PAST_VALUE)
    if bool(past_key) != bool(past_value) or (past_key and pen.operand(_VALID_LENGTHS)):
        raise pen.refusal("has only some of the cache's operands", "give past_key and past_value, or neither")
    past, past_values = (pen.known_shape(name)[2] if name else 0 for name in (past_key, past_value))
    if {shape[0] for shape in shapes} != {shapes[0][0]} or past + shapes[1][-2] != past_values + shapes[2][-2]:
        given = " and ".join(str(list(shape)) for shape in shapes)
        raise pen.refusal(f"has queries, keys and values of {given}", "give one batch, and a value for each key")
    return _Heads(
        query=query,
        key=pen.add("Concat", past_key, key, axis=2) if past_key else key,
        value=pen.add("Concat", past_value, value, axis=2) if past_value else value,
        query_heads=query_heads,
        key_heads=key_heads,
        features=shapes[0][2] // query_heads if is_flat else shapes[0][3],
        query_length=shapes[0][1] if is_flat else shapes[0][2],
        key_length=past + (shapes[1][1] if is_flat else shapes[1][2]),
        past_length=past,
        is_flat=is_flat,
    )


def _split_heads(pen: Pen, name: str, width: int, heads: int) -> str:
    if width % heads:
        raise pen.refusal(f"divides {width} features among {heads} heads", "the heads must divide the features")
    return pen.add("Transpose", pen.add("Reshape", name, pen.integers(0, 0, heads, -1)), perm=[0, 2, 1, 3])


def _repeated(pen: Pen, name: str, heads: _Heads) -> str:
    """Keys or values with one head per query head: h0, h0, h1, h1 where two queries share one."""
    if heads.query_heads == heads.key_heads:
        return name
    order = np.repeat(np.arange(heads.key_heads), heads.query_heads // heads.key_heads)
    return pen.add("Gather", name, pen.constant(order, np.int64), axis=1)


def _scaled_product(pen: Pen, heads: _Heads) -> str:
    """Both factors carry the square root of the scale, which keeps half precision from overflowing."""
    scale = float(pen.attribute("scale", 0.0)) or 1.0 / math.sqrt(max(1, heads.features))
    if scale < 0:
        raise pen.refusal(f"has the scale {scale}", "the scale must be positive")
    root = pen.like(math.sqrt(scale))
    keys = pen.add("Transpose", _repeated(pen, heads.key, heads), perm=[0, 1, 3, 2])
    return pen.add("MatMul", pen.add("Mul", heads.query, root), pen.add("Mul", keys, root))


def _capped(pen: Pen, product: str) -> str:
    softcap = float(pen.attribute("softcap", 0.0))
    if softcap <= 0:
        return product
    cap = pen.like(softcap)
    return pen.add("Mul", pen.add("Tanh", pen.add("Div", product, cap)), cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bias:
    """What is added before the softmax: 0 or -inf, or a mask's numbers; whether some row may be -inf throughout."""

    name: str
    may_mask_rows: bool


def _bias(pen: Pen, heads: _Heads) -> _Bias | None:
    allowed, parts = _allowed_positions(pen, heads), []
    if isinstance(allowed, str):
        parts.append(_as_bias(pen, allowed))
    elif allowed is not None:
        parts.append(pen.constant(np.where(allowed, 0.0, -np.inf), pen.dtype(pen.x)))
    extra = [name for name in (_mask(pen, heads), _padding(pen, heads)) if name]
    if not parts and not extra:
        return None
    rows_are_open = not extra and isinstance(allowed, np.ndarray) and bool(allowed.any(axis=-1).all())
    return _Bias(name=pen.chain("Add", [*parts, *extra]), may_mask_rows=not rows_are_open)


def _allowed_positions(pen: Pen, heads: _Heads) -> str | np.ndarray | None:
    """Which key each query may attend to by position: an array, or a tensor where that depends on valid lengths.

    Query i stands at place i + offset: behind the cache, or at the end of the valid keys. A causal one looks at keys
    j <= i + offset, a window at those with -right <= i + offset - j <= left.
    """
    left, right = pen.integer("left_window_size", -1), pen.integer("right_window_size", -1)
    if left < -1 or right < -1:
        raise pen.refusal(f"has windows of {left} and {right}", "a window is -1 or not negative")
    given = [(">=", 0, pen.flag("is_causal")), (">=", -right, right >= 0), ("<=", left, left >= 0)]
    bounds = [(how, bound) for how, bound, is_given in given if is_given]
    if not bounds:
        return None
    behind = np.arange(heads.query_length)[:, None] - np.arange(heads.key_length)[None, :]
    if not pen.operand(_VALID_LENGTHS):
        compared = [_COMPARISONS[how][1](behind + heads.past_length, bound) for how, bound in bounds]
        return np.asarray(np.logical_and.reduce(compared))
    lengths = pen.add("Reshape", pen.operand(_VALID_LENGTHS), pen.integers(-1, 1, 1, 1))
    moved = pen.add("Add", pen.constant((behind - heads.query_length)[None, None], np.int64), lengths)
    terms = [pen.add(_COMPARISONS[how][0], moved, pen.constant(bound, np.int64)) for how, bound in bounds]
    return pen.chain("And", terms)


def _as_bias(pen: Pen, allowed: str) -> str:
    return pen.add("Where", allowed, pen.like(0.0), pen.like(-np.inf))


def _mask(pen: Pen, heads: _Heads) -> str:
    """The mask operand as a bias over all keys; those that it does not reach are masked."""
    name = pen.operand(_MASK)
    if not name:
        return ""
    shape = pen.known_shape(name)
    kind, code = pen.known_type(name), pen.known_type(pen.x)
    if kind == TensorProto.BOOL:
        name = _as_bias(pen, name)
    elif kind != code:
        name = pen.cast(name, code)
    missing = heads.key_length - shape[-1]
    if missing > 0 and shape[-1] != 1:
        hidden = pen.constant(np.full((*shape[:-1], missing), -np.inf), pen.dtype(pen.x))
        name = pen.add("Concat", name, hidden, axis=-1)
    elif missing > 0:
        raise pen.refusal(f"has a mask of one key for {heads.key_length}", "expand the mask before")
    return name


def _padding(pen: Pen, heads: _Heads) -> str:
    """Keys behind the valid length of their batch are masked."""
    name = pen.operand(_VALID_LENGTHS)
    if not name:
        return ""
    lengths = pen.add("Reshape", name, pen.integers(-1, 1, 1, 1))
    places = pen.constant(np.arange(heads.key_length).reshape(1, 1, 1, -1), np.int64)
    return _as_bias(pen, pen.add("Less", places, lengths))


def _softmax(pen: Pen, biased: str, bias: _Bias | None) -> str:
    """Probabilities; all zero in a row whose every key is masked, where a softmax alone gives NaN."""
    code = pen.known_type(pen.x)
    precision = pen.integer("softmax_precision", code)
    wide = biased if precision == code else pen.cast(biased, precision)
    probabilities = pen.add("Softmax", wide, axis=-1)
    if precision != code:
        probabilities = pen.cast(probabilities, code)
    if bias is None or not bias.may_mask_rows:
        return probabilities
    # (Not by the row's maximum: a reduction's start value may be the lowest finite number, which masks use as well.)
    is_open = pen.cast(pen.add("Greater", bias.name, pen.like(-np.inf)), FLOAT)
    any_open = pen.reduce("ReduceMax", is_open, -1, keepdims=True)
    is_masked = pen.add("Equal", any_open, pen.constant(0.0, np.float32))
    return pen.add("Where", is_masked, pen.like(0.0), probabilities)


def _present(pen: Pen, heads: _Heads) -> None:
    for index, name in ((1, heads.key), (2, heads.value)):
        if pen.result(index):
            pen.add("Identity", name, out=pen.result(index))


def _inspected(pen: Pen, forms: Mapping[int, str]) -> None:
    """The fourth output: the scores in the form that the model asks for."""
    mode = pen.integer("qk_matmul_output_mode", 0)
    if mode not in forms:
        raise pen.refusal(f"has the qk_matmul_output_mode {mode}", "use 0, 1, 2 or 3")
    if pen.result(3):
        pen.add("Identity", forms[mode], out=pen.result(3))
