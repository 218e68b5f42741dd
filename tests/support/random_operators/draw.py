"""The generator: case number ``index`` of a seed, the same on every machine and version of Python.

Slot ``index % len(SLOTS)`` says what kind of operator it is, so that any ``len(SLOTS)`` cases in a row hold every kind.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from . import draw_chains, draw_elements, draw_products, draw_rows, reference
from .record import CaseInput, OperatorCase
from .sizes import Draw, Unsuitable

SLOTS: tuple[tuple[str, Draw], ...] = (
    ("matmul", draw_products.matmul),
    ("conv2d", draw_products.conv2d),
    ("binary", draw_elements.binary),
    ("max_pool", draw_rows.max_pool),
    ("reduce", draw_rows.reduce),
    ("softmax", draw_rows.softmax),
    ("permute_dims", draw_elements.permute_dims),
    ("batched_matmul", draw_products.batched_matmul),
    ("conv1d", draw_products.conv1d),
    ("conv2d_depthwise", draw_products.conv2d_depthwise),
    ("unary", draw_elements.unary),
    ("concat", draw_elements.concat),
    ("layer_norm", draw_rows.layer_norm),
    ("avg_pool", draw_rows.average_pool),
    ("matmul", draw_products.matmul),
    ("conv3d", draw_products.conv3d),
    ("reduce", draw_rows.reduce),
    ("strided_slice", draw_elements.strided_slice),
    ("log_softmax", draw_rows.log_softmax),
    ("conv2d", draw_products.conv2d),
    ("reshape", draw_elements.reshape),
    ("adaptive_pool", draw_rows.adaptive_pool),
    ("matmul_small_integers", draw_products.matmul_int8),
    ("conv1d_transpose", draw_products.conv1d_transpose),
    ("pad", draw_elements.pad),
    ("rms_norm", draw_rows.rms_norm),
    ("binary", draw_elements.binary),
    ("conv2d_grouped", draw_products.conv2d_grouped),
    ("batched_matmul", draw_products.batched_matmul),
    ("tile", draw_elements.tile),
    ("group_norm", draw_rows.group_norm),
    ("take", draw_elements.take),
    ("conv2d", draw_products.conv2d),
    ("reduce", draw_rows.reduce),
    ("where", draw_elements.where),
    ("unary", draw_elements.unary),
    ("matmul", draw_products.matmul),
    ("cast", draw_elements.cast),
    ("conv2d_transpose", draw_products.conv2d_transpose),
    ("instance_norm", draw_rows.instance_norm),
    ("flip", draw_elements.flip),
    ("max_pool", draw_rows.max_pool),
    ("conv2d_small_integers", draw_products.conv2d_int8),
    ("repeat", draw_elements.repeat),
    ("softmax", draw_rows.softmax),
    ("split", draw_elements.split),
    ("conv3d", draw_products.conv3d),
    ("argument", draw_rows.argument),
    ("conv2d", draw_products.conv2d),
    ("broadcast", draw_elements.broadcast),
    ("cumsum", draw_rows.cumsum),
    ("avg_pool", draw_rows.average_pool),
    ("matmul", draw_products.matmul),
    ("gather", draw_elements.gather),
    ("attention", draw_chains.attention),
    ("gram", draw_chains.gram),
    ("centre", draw_chains.centre),
    ("separable", draw_chains.separable),
    ("conv3d_transpose", draw_products.conv3d_transpose),
    ("conv1d", draw_products.conv1d),
    ("depthwise_image", draw_products.depthwise_image),
    ("reduce_short_rows", draw_rows.reduce_short_rows),
    ("gemv", draw_products.gemv),
    ("pool_image", draw_rows.pool_image),
    ("residual_block", draw_chains.residual_block),
)
KINDS = tuple(dict.fromkeys(kind for kind, _ in SLOTS))

FLOAT_EPILOGUES = (
    "none", "none", "none", "relu", "bias", "bias_relu", "bias_residual_relu", "gelu", "sigmoid_product", "clip",
    "scale_cast", "relu_beside", "broadcast_product", "skip",
)  # fmt: skip
INTEGER_EPILOGUES = ("none", "bias", "bias_relu", "clip", "requantise", "scale_cast")
SHORT_EPILOGUES = ("none", "none", "none", "relu", "residual", "clip", "broadcast_product", "skip")
IEEE_ONLY = ("nn.group_norm",)
PROLOGUES = ("none",) * 7 + ("relu", "scale", "add")


def draw_case(seed: int, index: int) -> OperatorCase:
    """Case ``index`` of ``seed``."""
    kind, draw = SLOTS[index % len(SLOTS)]
    rng = random.Random(f"{seed}/{index}")
    case = None
    while case is None:
        case = _draw(draw, rng)
    case = replace(case, seed=seed, index=index, kind=kind)
    case = _with_epilogue(_with_prologue(case, rng), rng)
    return replace(case, **draw_options(rng))


def with_floats(case: OperatorCase, dtype: str) -> OperatorCase:
    """``case`` with the floats of its operands in ``dtype``; wider results, and what joins them, stay so.

    Empty, or of an operator that Relax has for IEEE's types alone: as it is.
    """
    if not dtype or case.operator in IEEE_ONLY:
        return case
    narrow = ("float16",) if case.inputs[0].dtype == "float16" else ("float16", "float32")
    inputs = tuple(replace(item, dtype=dtype) if item.dtype in narrow else item for item in case.inputs)
    return replace(case, inputs=inputs, out_dtype=dtype if case.out_dtype == "float16" else case.out_dtype)


def _draw(draw: Draw, rng: random.Random) -> OperatorCase | None:
    """One attempt; None for a window wider than its padded input, or too much work."""
    try:
        return draw(rng)
    except Unsuitable:
        return None


def draw_options(rng: random.Random) -> dict[str, Any]:
    """Fields of a case that say how it is built: two cases in five differ from the defaults in one of them."""
    match rng.randrange(10):
        case 0:
            return {"num_threads": rng.choice((1, 3, 24))}
        case 1:
            return {"epsilon": rng.choice((0.1, 0.5))}
        case 2:
            return {"device": "cpu-avx2"}
        case 3:
            return {"device": "cpu-sse2"}
    return {}


def _with_prologue(case: OperatorCase, rng: random.Random) -> OperatorCase:
    """A convolution's or pool's producer, for the floating-point operators that allow one."""
    first = case.inputs[0]
    if "float" not in first.dtype or first.values != "signed" or case.epilogue == "fixed":
        return case
    prologue = rng.choice(PROLOGUES)
    extra = (CaseInput(shape=first.shape, dtype=first.dtype),) if prologue == "add" else ()
    return replace(case, prologue=prologue, inputs=(*case.inputs, *extra))


def _with_epilogue(case: OperatorCase, rng: random.Random) -> OperatorCase:
    if case.epilogue == "fixed":
        return replace(case, epilogue="none")
    dtype = case.out_dtype or case.inputs[0].dtype
    if not case.operator.startswith(("matmul", "nn.conv")):
        choices: tuple[str, ...] = SHORT_EPILOGUES if "float" in dtype else ("none",)
    else:
        choices = FLOAT_EPILOGUES if "float" in dtype else INTEGER_EPILOGUES
    epilogue = rng.choice(choices)
    if not any(word in epilogue for word in ("bias", "residual", "broadcast", "skip")):
        return replace(case, epilogue=epilogue)
    shape = reference.output_shape(case)
    if epilogue == "skip" and (shape, dtype) != (case.inputs[0].shape, case.inputs[0].dtype):
        epilogue = "residual"
    extra = []
    if epilogue == "broadcast_product":
        ones = tuple(1 if rng.random() < 0.5 else n for n in shape)
        extra.append(_extra_input(ones, dtype, constant=rng.random() < 0.5))
    if "bias" in epilogue:
        extra.append(_extra_input(_bias_shape(case, shape), dtype, constant=rng.random() < 0.7))
    if "residual" in epilogue:
        extra.append(_extra_input(shape, dtype, constant=False))
    return replace(case, epilogue=epilogue, inputs=(*case.inputs, *extra))


def _extra_input(shape: tuple[int, ...], dtype: str, *, constant: bool) -> CaseInput:
    if "float" in dtype:
        return CaseInput(shape=shape, dtype=dtype, constant=constant)
    return CaseInput(shape=shape, dtype=dtype, constant=constant, values="integer", limit=1000)


def _bias_shape(case: OperatorCase, shape: tuple[int, ...]) -> tuple[int, ...]:
    """One value per column of a product, per output channel of a convolution."""
    if not case.layouts:
        return shape[-1:]
    channel = case.layouts[0].index("C")
    return (shape[channel], *[1] * (len(shape) - channel - 1))
