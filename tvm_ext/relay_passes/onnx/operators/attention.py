"""Attention of the standard domain (operator sets 23 and up), written with products and a softmax.

The stock importer takes it for the operator of the same name in com.microsoft, whose operands are others; ONNX's own
definition by simpler operators computes masks from shapes at run time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..graph import attribute
from .context import Context, Pen, Rule, operand, refusal, result

_MASK, _PAST_KEY, _PAST_VALUE, _VALID_LENGTHS = 3, 4, 5, 6
_PRODUCT, _CAPPED, _BIASED, _PROBABILITIES = range(4)


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


def _attention(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    pen = Pen(node=node, context=context)
    code = context.known_type(node, node.input[0])
    heads = _heads(pen, context)
    bias = _bias(pen, context, heads, code)
    product = _scaled_product(pen, heads, code)
    capped = _capped(pen, product, code)
    biased = capped if bias is None else pen.add("Add", capped, bias.name)
    probabilities = _softmax(pen, biased, bias, code)
    _present(pen, heads)
    _inspected(pen, {_PRODUCT: product, _CAPPED: capped, _BIASED: biased, _PROBABILITIES: probabilities})
    value = _repeated(pen, heads.value, heads)
    if heads.is_flat:
        rows = pen.add("Transpose", pen.add("MatMul", probabilities, value), perm=[0, 2, 1, 3])
        pen.add("Reshape", rows, pen.integers(0, 0, -1), out=node.output[0])
    else:
        pen.add("MatMul", probabilities, value, out=node.output[0])
    return pen.nodes


def _heads(pen: Pen, context: Context) -> _Heads:
    """The operands with one axis for the heads, the cached keys and values in front."""
    node = pen.node
    query, key, value = (operand(node, index) for index in range(3))
    shapes = [context.known_shape(node, name) for name in (query, key, value)]
    is_flat = len(shapes[0]) == 3
    if is_flat:
        query_heads, key_heads = int(attribute(node, "q_num_heads", 0)), int(attribute(node, "kv_num_heads", 0))
    else:
        query_heads, key_heads = shapes[0][1], shapes[1][1]
    if query_heads < 1 or key_heads < 1 or query_heads % key_heads:
        raise refusal(node, f"has {query_heads} query and {key_heads} key heads", "the second must divide the first")
    if is_flat:
        query = _split_heads(pen, query, shapes[0][2], query_heads)
        key = _split_heads(pen, key, shapes[1][2], key_heads)
        value = _split_heads(pen, value, shapes[2][2], key_heads)
    past_key, past_value = operand(node, _PAST_KEY), operand(node, _PAST_VALUE)
    if bool(past_key) != bool(past_value) or (past_key and operand(node, _VALID_LENGTHS)):
        raise refusal(node, "has only some of the cache's operands", "give past_key and past_value, or neither")
    past = context.known_shape(node, past_key)[2] if past_key else 0
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
        raise refusal(pen.node, f"divides {width} features among {heads} heads", "the heads must divide the features")
    return pen.add("Transpose", pen.add("Reshape", name, pen.integers(0, 0, heads, -1)), perm=[0, 2, 1, 3])


def _repeated(pen: Pen, name: str, heads: _Heads) -> str:
    """Keys or values with one head per query head: h0, h0, h1, h1 where two queries share one."""
    if heads.query_heads == heads.key_heads:
        return name
    order = np.repeat(np.arange(heads.key_heads), heads.query_heads // heads.key_heads)
    return pen.add("Gather", name, pen.constant(order, np.int64), axis=1)


def _scaled_product(pen: Pen, heads: _Heads, code: int) -> str:
    """Both factors carry the square root of the scale, which keeps half precision from overflowing."""
    scale = float(attribute(pen.node, "scale", 0.0)) or 1.0 / math.sqrt(heads.features)
    if scale < 0:
        raise refusal(pen.node, f"has the scale {scale}", "the scale must be positive")
    root = pen.constant(math.sqrt(scale), helper.tensor_dtype_to_np_dtype(code))
    keys = pen.add("Transpose", _repeated(pen, heads.key, heads), perm=[0, 1, 3, 2])
    return pen.add("MatMul", pen.add("Mul", heads.query, root), pen.add("Mul", keys, root))


def _capped(pen: Pen, product: str, code: int) -> str:
    softcap = float(attribute(pen.node, "softcap", 0.0))
    if softcap <= 0:
        return product
    cap = pen.constant(softcap, helper.tensor_dtype_to_np_dtype(code))
    return pen.add("Mul", pen.add("Tanh", pen.add("Div", product, cap)), cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bias:
    """What is added before the softmax: 0 or -inf, or a mask's numbers; whether some row may be -inf throughout."""

    name: str
    may_mask_rows: bool


def _bias(pen: Pen, context: Context, heads: _Heads, code: int) -> _Bias | None:
    parts = []
    allowed = _allowed_positions(pen, heads)
    if isinstance(allowed, str):
        parts.append(_as_bias(pen, allowed, code))
    elif allowed is not None:
        dtype = helper.tensor_dtype_to_np_dtype(code)
        parts.append(pen.constant(np.where(allowed, 0.0, -np.inf), dtype))
    only_positions = bool(parts) and not isinstance(allowed, str)
    rows_are_open = only_positions and allowed is not None and bool(np.asarray(allowed).any(axis=-1).all())
    for extra in (_mask(pen, context, heads, code), _padding(pen, heads, code)):
        if extra:
            parts.append(extra)
            rows_are_open = False
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = pen.add("Add", total, part)
    return _Bias(name=total, may_mask_rows=not rows_are_open)


def _allowed_positions(pen: Pen, heads: _Heads) -> str | np.ndarray | None:
    """Which key each query may attend to by position: an array, or a tensor where that depends on valid lengths.

    Query i stands at place i + offset: behind the cache, or at the end of the valid keys. A causal one looks at keys
    j <= i + offset, a window at those with -right <= i + offset - j <= left.
    """
    node = pen.node
    bounds: list[tuple[int | None, int | None]] = []
    left, right = int(attribute(node, "left_window_size", -1)), int(attribute(node, "right_window_size", -1))
    if left < -1 or right < -1:
        raise refusal(node, f"has windows of {left} and {right}", "a window is -1 or not negative")
    if attribute(node, "is_causal", 0):
        bounds.append((0, None))
    if left >= 0 or right >= 0:
        bounds.append((-right if right >= 0 else None, left if left >= 0 else None))
    if not bounds:
        return None
    behind = np.arange(heads.query_length)[:, None] - np.arange(heads.key_length)[None, :]
    if not operand(node, _VALID_LENGTHS):
        distance = behind + heads.past_length
        allowed = np.ones(distance.shape, np.bool_)
        for low, high in bounds:
            allowed &= (distance >= low) if low is not None else True
            allowed &= (distance <= high) if high is not None else True
        return allowed
    lengths = pen.add("Reshape", operand(node, _VALID_LENGTHS), pen.integers(-1, 1, 1, 1))
    moved = pen.add("Add", pen.constant((behind - heads.query_length)[None, None], np.int64), lengths)
    terms = []
    for low, high in bounds:
        terms += [pen.add("GreaterOrEqual", moved, pen.constant(low, np.int64))] if low is not None else []
        terms += [pen.add("LessOrEqual", moved, pen.constant(high, np.int64))] if high is not None else []
    total = terms[0]
    for term in terms[1:]:
        total = pen.add("And", total, term)
    return total


def _as_bias(pen: Pen, allowed: str, code: int) -> str:
    dtype = helper.tensor_dtype_to_np_dtype(code)
    return pen.add("Where", allowed, pen.constant(0.0, dtype), pen.constant(-np.inf, dtype))


def _mask(pen: Pen, context: Context, heads: _Heads, code: int) -> str:
    """The mask operand as a bias over all keys; those that it does not reach are masked."""
    name = operand(pen.node, _MASK)
    if not name:
        return ""
    shape = context.known_shape(pen.node, name)
    kind = context.known_type(pen.node, name)
    if kind == TensorProto.BOOL:
        name = _as_bias(pen, name, code)
    elif kind != code:
        name = pen.cast(name, code)
    missing = heads.key_length - shape[-1]
    if missing > 0 and shape[-1] != 1:
        dtype = helper.tensor_dtype_to_np_dtype(code)
        name = pen.add("Concat", name, pen.constant(np.full((*shape[:-1], missing), -np.inf), dtype), axis=-1)
    elif missing > 0:
        raise refusal(pen.node, f"has a mask of one key for {heads.key_length}", "expand the mask before")
    return name


def _padding(pen: Pen, heads: _Heads, code: int) -> str:
    """Keys behind the valid length of their batch are masked."""
    name = operand(pen.node, _VALID_LENGTHS)
    if not name:
        return ""
    lengths = pen.add("Reshape", name, pen.integers(-1, 1, 1, 1))
    places = pen.constant(np.arange(heads.key_length).reshape(1, 1, 1, -1), np.int64)
    return _as_bias(pen, pen.add("Less", places, lengths), code)


def _softmax(pen: Pen, biased: str, bias: _Bias | None, code: int) -> str:
    """Probabilities; all zero in a row whose every key is masked, where a softmax alone gives NaN."""
    precision = int(attribute(pen.node, "softmax_precision", code))
    wide = biased if precision == code else pen.cast(biased, precision)
    probabilities = pen.add("Softmax", wide, axis=-1)
    if precision != code:
        probabilities = pen.cast(probabilities, code)
    if bias is None or not bias.may_mask_rows:
        return probabilities
    dtype = helper.tensor_dtype_to_np_dtype(code)
    # (Not by the row's maximum: a reduction's start value may be the lowest finite number, which masks use as well.)
    is_open = pen.cast(pen.add("Greater", bias.name, pen.constant(-np.inf, dtype)), TensorProto.FLOAT)
    any_open = pen.reduce("ReduceMax", is_open, -1, keepdims=True)
    is_masked = pen.add("Equal", any_open, pen.constant(0.0, np.float32))
    return pen.add("Where", is_masked, pen.constant(0.0, dtype), probabilities)


def _present(pen: Pen, heads: _Heads) -> None:
    for index, name in ((1, heads.key), (2, heads.value)):
        if result(pen.node, index):
            pen.add("Identity", name, out=result(pen.node, index))


def _inspected(pen: Pen, forms: Mapping[int, str]) -> None:
    """The fourth output: the scores in the form that the model asks for."""
    mode = int(attribute(pen.node, "qk_matmul_output_mode", 0))
    if mode not in forms:
        raise refusal(pen.node, f"has the qk_matmul_output_mode {mode}", "use 0, 1, 2 or 3")
    if result(pen.node, 3):
        pen.add("Identity", forms[mode], out=result(pen.node, 3))


RULES: Mapping[str, Rule] = {"Attention": _attention}
REPLACED = frozenset({"Attention"})
