"""An `OperatorCase` as a Relax module with one function ``main``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax

from tvm_ext._tvm import Expr

from . import reference
from .record import OperatorCase


def module_of(case: OperatorCase) -> tvm.IRModule:
    """``main(x0, x1, ...)`` computing ``case``; constant inputs are parameters too, to be bound by `relay.build`."""
    builder = relax.BlockBuilder()
    parameters = [
        relax.Var(name, relax.TensorType(item.shape, item.dtype))
        for name, item in zip(parameter_names(case), case.inputs, strict=True)
    ]
    with builder.function("main", parameters):
        with builder.dataflow():
            outputs = [builder.emit_output(expr) for expr in _outputs(builder, case, parameters)]
        builder.emit_func_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
    return builder.get()


def parameter_names(case: OperatorCase) -> list[str]:
    return [f"x{position}" for position in range(len(case.inputs))]


def _outputs(builder: Any, case: OperatorCase, parameters: Sequence[Expr]) -> list[Expr]:
    first, extra = parameters[0], list(parameters[case.arity :])
    if case.prologue != "none":
        first = builder.emit(PROLOGUES[case.prologue](first, extra.pop(0) if case.prologue == "add" else None))
    result = _operator(builder, case, [first, *parameters[1 : case.arity]])
    if case.operator == "split":
        parts = builder.emit(result)
        return [relax.TupleGetItem(parts, position) for position in range(len(case.get("at")) + 1)]
    if case.epilogue == "none":
        return [result]
    return EPILOGUES[case.epilogue](
        builder, builder.emit(result), [parameters[0]] if case.epilogue == "skip" else extra
    )


def _constant(value: float, like: Expr) -> Expr:
    return relax.const(value, str(like.ty.dtype))


def _is_float(value: Expr) -> bool:
    return "float" in str(value.ty.dtype)


# --- around the operator -------------------------------------------------------------------------------------------
PROLOGUES: dict[str, Callable[[Expr, Expr], Expr]] = {
    "relu": lambda x, _: relax.op.nn.relu(x),
    "scale": lambda x, _: relax.op.multiply(x, _constant(reference.SCALE, x)),
    "add": lambda x, other: relax.op.add(x, other),
}


def _bias_relu(builder: Any, x: Expr, extra: Sequence[Expr]) -> list[Expr]:
    for value in extra:
        x = builder.emit(relax.op.add(x, value))
    return [relax.op.nn.relu(x)]


def _clip(_builder: Any, x: Expr, _extra: Sequence[Expr]) -> list[Expr]:
    low, high = reference.CLIP if _is_float(x) else reference.CLIP_INT
    return [relax.op.clip(x, low, high)]


def _scale_cast(builder: Any, x: Expr, _extra: Sequence[Expr]) -> list[Expr]:
    """Half precision and integers come out as float32, single precision as float16."""
    wide = "float16" if str(x.ty.dtype) == "float32" else "float32"
    cast = builder.emit(relax.op.astype(x, wide))
    return [relax.op.multiply(cast, relax.const(reference.SCALE, wide))]


def _requantise(builder: Any, x: Expr, _extra: Sequence[Expr]) -> list[Expr]:
    value = builder.emit(relax.op.astype(x, "float32"))
    value = builder.emit(relax.op.multiply(value, relax.const(reference.REQUANTISE_SHIFT, "float32")))
    value = builder.emit(relax.op.add(value, relax.const(reference.REQUANTISE_OFFSET, "float32")))
    value = builder.emit(relax.op.round(value))
    value = builder.emit(relax.op.clip(value, -128, 127))
    return [relax.op.astype(value, "int8")]


def _sigmoid_product(builder: Any, x: Expr, _extra: Sequence[Expr]) -> list[Expr]:
    return [relax.op.multiply(builder.emit(relax.op.sigmoid(x)), x)]


EPILOGUES: dict[str, Callable[[Any, Expr, Sequence[Expr]], list[Expr]]] = {
    "relu": lambda _builder, x, _: [relax.op.nn.relu(x)],
    "bias": lambda _builder, x, extra: [relax.op.add(x, extra[0])],
    "residual": lambda _builder, x, extra: [relax.op.add(x, extra[0])],
    "bias_relu": _bias_relu,
    "bias_residual_relu": _bias_relu,
    "broadcast_product": lambda _builder, x, extra: [relax.op.multiply(x, extra[0])],
    "skip": lambda _builder, x, extra: [relax.op.add(x, extra[0])],
    "gelu": lambda _builder, x, _: [relax.op.nn.gelu(x)],
    "sigmoid_product": _sigmoid_product,
    "clip": _clip,
    "scale_cast": _scale_cast,
    "requantise": _requantise,
    "relu_beside": lambda _builder, x, _: [x, relax.op.nn.relu(x)],
}


# --- operators -----------------------------------------------------------------------------------------------------
def _function(case: OperatorCase) -> Callable[..., Expr]:
    found: Any = relax.op
    for part in case.operator.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _operator(builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    """The call of the operator; its attributes are passed as the keywords they are called by, unless stated here."""
    special = SPECIAL.get(case.operator) or next(
        (build for prefix, build in FAMILIES if case.operator.startswith(prefix)), None
    )
    if special is not None:
        return special(builder, case, inputs)
    return _function(case)(*inputs, **{name: _python(value) for name, value in case.attributes})


def _python(value: tuple[int, ...]) -> int | list[int]:
    return value[0] if len(value) == 1 else list(value)


def _matmul(builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    a, b = (
        _swap_last(builder, value) if case.flag(name) else value
        for value, name in zip(inputs, ("transpose_a", "transpose_b"), strict=True)
    )
    return relax.op.matmul(a, b, out_dtype=case.out_dtype)


def _swap_last(builder: Any, value: Expr) -> Expr:
    rank = len(value.ty.shape)
    return builder.emit(relax.op.permute_dims(value, [*range(rank - 2), rank - 1, rank - 2]))


def _convolution(_builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    attributes = {name: list(value) for name, value in case.attributes}
    groups = attributes.pop("groups")[0]
    data, weight = case.layouts
    return _function(case)(
        *inputs, **attributes, groups=groups, data_layout=data, kernel_layout=weight, out_dtype=case.out_dtype
    )


def _pool(_builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    flags = ("ceil_mode", "count_include_pad")
    keywords = {name: bool(value[0]) if name in flags else list(value) for name, value in case.attributes}
    return _function(case)(inputs[0], **keywords, layout=case.layouts[0])


def _reduction(_builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    return _function(case)(inputs[0], axis=list(case.get("axes")), keepdims=case.flag("keepdims"))


def _search(_builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    return _function(case)(inputs[0], axis=case.get("axis")[0], keepdims=case.flag("keepdims"))


def _norm(_builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    return _function(case)(*inputs, axes=list(case.get("axes")), epsilon=reference.EPSILON)


def _group_norm(_builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    axes = list(range(2, len(inputs[0].ty.shape)))
    groups = case.get("num_groups")[0]
    return relax.op.nn.group_norm(*inputs, num_groups=groups, channel_axis=1, axes=axes, epsilon=reference.EPSILON)


def _instance_norm(_builder: Any, _case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    axes = list(range(2, len(inputs[0].ty.shape)))
    return relax.op.nn.instance_norm(*inputs, channel_axis=1, axes=axes, epsilon=reference.EPSILON)


def _pad(_builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    mode = reference.PAD_MODES[case.get("mode")[0]]
    value = reference.PAD_VALUE if _is_float(inputs[0]) else 0
    return relax.op.nn.pad(inputs[0], list(case.get("pad_width")), mode, value)


def _slice(_builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    """A negative ``end`` of ours means "down to and with element 0", which Relax writes as an end before -size."""
    shape = [int(size) for size in inputs[0].ty.shape]
    ends = [end if end >= 0 else -shape[axis] - 1 for axis, end in zip(case.get("axes"), case.get("end"), strict=True)]
    return relax.op.strided_slice(
        inputs[0], list(case.get("axes")), list(case.get("begin")), ends, list(case.get("strides"))
    )


def _attention(builder: Any, _case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    query, key, value = inputs
    scores = builder.emit(relax.op.matmul(query, _swap_last(builder, key)))
    scores = builder.emit(relax.op.multiply(scores, _constant(reference.SCALE, scores)))
    return relax.op.matmul(builder.emit(relax.op.nn.softmax(scores, axis=-1)), value)


def _gram(builder: Any, _case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    return relax.op.matmul(inputs[0], _swap_last(builder, inputs[0]))


def _centre(builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    mean = builder.emit(relax.op.mean(inputs[0], axis=list(case.get("axes")), keepdims=True))
    return relax.op.subtract(inputs[0], mean)


def _separable(builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    attributes = {name: list(value) for name, value in case.attributes}
    groups = attributes.pop("groups")[0]
    depthwise = builder.emit(relax.op.nn.conv2d(*inputs[:2], **attributes, groups=groups))
    return relax.op.nn.conv2d(builder.emit(relax.op.nn.relu(depthwise)), inputs[2])


def _residual_block(builder: Any, case: OperatorCase, inputs: Sequence[Expr]) -> Expr:
    data, first, second, third = inputs
    value = builder.emit(relax.op.nn.conv2d(data, first, strides=list(case.get("strides")), padding=1))
    value = builder.emit(relax.op.nn.relu(value))
    value = builder.emit(relax.op.add(builder.emit(relax.op.nn.conv2d(value, second)), value))
    value = builder.emit(relax.op.nn.max_pool2d(value, [3, 3], list(case.get("pool_strides")), [1, 1, 1, 1]))
    return relax.op.nn.conv2d(value, third, padding=1)


SPECIAL: dict[str, Callable[[Any, OperatorCase, Sequence[Expr]], Expr]] = {
    "matmul": _matmul,
    **dict.fromkeys(("sum", "mean", "max", "min", "prod", "variance", "std"), _reduction),
    **dict.fromkeys(("argmax", "argmin"), _search),
    **dict.fromkeys(("nn.layer_norm", "nn.rms_norm"), _norm),
    "nn.group_norm": _group_norm,
    "nn.instance_norm": _instance_norm,
    "nn.pad": _pad,
    "strided_slice": _slice,
    "astype": lambda _builder, case, inputs: relax.op.astype(inputs[0], case.out_dtype),
    "permute_dims": lambda _builder, case, inputs: relax.op.permute_dims(inputs[0], list(case.get("axes"))),
    "reshape": lambda _builder, case, inputs: relax.op.reshape(inputs[0], list(case.get("shape"))),
    "broadcast_to": lambda _builder, case, inputs: relax.op.broadcast_to(inputs[0], list(case.get("shape"))),
    "concat": lambda _builder, case, inputs: relax.op.concat(list(inputs), case.get("axis")[0]),
    "stack": lambda _builder, case, inputs: relax.op.stack(list(inputs), case.get("axis")[0]),
    "split": lambda _builder, case, inputs: relax.op.split(inputs[0], list(case.get("at")), case.get("axis")[0]),
    "chain.attention": _attention,
    "chain.gram": _gram,
    "chain.centre": _centre,
    "chain.separable": _separable,
    "chain.residual_block": _residual_block,
    "tile": lambda _builder, case, inputs: relax.op.tile(inputs[0], list(case.get("repeats"))),
}
FAMILIES: tuple[tuple[str, Callable[[Any, OperatorCase, Sequence[Expr]], Expr]], ...] = (
    ("nn.conv", _convolution),
    ("nn.max_pool", _pool),
    ("nn.avg_pool", _pool),
    ("nn.adaptive_avg_pool", _pool),
)
