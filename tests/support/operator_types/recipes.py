"""One recipe for each operator, and the operators that have none, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .definitions import local_response
from .record import Operand, Recipe


def _names(text: str) -> list[str]:
    return text.split()


def _given(*values: float, shape: Sequence[int] | None = None, is_known: bool = True) -> Operand:
    """An operand with these values: a vector unless `shape` says otherwise."""
    return Operand(shape=(len(values),) if shape is None else tuple(shape), values=values, is_known=is_known)


def _drawn(*shape: int, low: float = -3.0, high: float = 3.0, has_zero: bool = True) -> Operand:
    return Operand(shape=shape, low=low, high=high, has_zero=has_zero)


def _any(*shape: int) -> Operand:
    """Integers from all that their type holds."""
    return Operand(shape=shape, whole_range=True)


def _one(operand: Operand, **attributes: Any) -> Recipe:
    return Recipe(operands=(operand,), attributes=attributes)


def _of(*operands: Operand | None, **attributes: Any) -> Recipe:
    return Recipe(operands=operands, attributes=attributes)


_IMAGE = _drawn(1, 4, 5, 6)
_SCALE = _drawn(4, low=0.5, high=2.0)
_FUNCTIONS = (
    "Celu Cos Cosh Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Mish Selu Shrink Sigmoid Sin Sinh Softplus "
    "Softsign Swish Tan Tanh ThresholdedRelu Asinh Atan Ceil Floor Round IsInf IsNaN Softmax LogSoftmax Hardmax"
)
_ON_ALL_BITS = "Abs Neg Sign Relu BitwiseNot Not Identity Flatten Transpose Shape Size NonZero"
_PAIRS_ON_ALL_BITS = (
    "Add Sub Mul Max Min Equal Less Greater LessOrEqual GreaterOrEqual And Or Xor BitwiseAnd BitwiseOr BitwiseXor"
)
_REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"

ELEMENTWISE: dict[str, Recipe] = {
    **dict.fromkeys(_names(_FUNCTIONS), _one(_drawn(3, 4))),
    **dict.fromkeys(_names(_ON_ALL_BITS), _one(_any(3, 4))),
    **dict.fromkeys(_names(_PAIRS_ON_ALL_BITS), _of(_any(3, 4), _any(4))),
    **dict.fromkeys(_names("Acos Asin Atanh"), _one(_drawn(3, 4, low=-0.9, high=0.9))),
    **dict.fromkeys(_names("Log Sqrt Reciprocal"), _one(_drawn(3, 4, low=0.5, high=5.0))),
    "Acosh": _one(_drawn(3, 4, low=1.1, high=5.0)),
    "BitShift": _of(_any(3, 4), _drawn(4, low=0, high=5), direction="LEFT"),
    "Clip": _of(_any(3, 4), _given(1, shape=()), _given(2, shape=())),
    "Div": _of(_any(3, 4), _drawn(4, low=-5, high=5, has_zero=False)),
    "Dropout": Recipe(operands=(_any(3, 4), _given(0.5, shape=())), outputs=2),
    "Mean": _of(_drawn(3, 4), _drawn(4)),
    "Mod": _of(_any(3, 4), _drawn(4, low=-5, high=5, has_zero=False)),
    "PRelu": _of(_drawn(3, 4), _drawn(4)),
    "Pow": _of(_drawn(3, 4, low=1, high=4), _drawn(4, low=0, high=3)),
    "Sum": _of(_drawn(3, 4), _drawn(4)),
    "SwiGLU": _of(_drawn(3, 4), _drawn(3, 4)),
    "Where": _of(_any(3, 4), _any(4), _any(3, 4)),
}

CASTS: dict[str, Recipe] = {
    "BitCast": Recipe(operands=(_any(3, 4),), type_attributes={"T2": "to"}, is_crossed=True),
    "Cast": Recipe(
        operands=(Operand(low=0, high=100, whole_range=True),), type_attributes={"T2": "to"}, is_crossed=True
    ),
    "CastLike": Recipe(operands=(Operand(low=0, high=100, whole_range=True), _any(1))),
    "DequantizeLinear": Recipe(
        operands=(_any(3, 4), _given(0.5, shape=()), _given(3, shape=())), fixed={"T1": "int8", "T3": "float32"}
    ),
    "DynamicQuantizeLinear": Recipe(operands=(_drawn(3, 4),), outputs=3),
    "QuantizeLinear": Recipe(operands=(_drawn(3, 4), _given(0.5, shape=()), _given(3, shape=()))),
}

REDUCTIONS: dict[str, Recipe] = {
    **{f"Reduce{name}": _of(_drawn(3, 4, low=1, high=4), _given(1)) for name in _names(_REDUCTIONS)},
    **dict.fromkeys(_names("ReduceMax ReduceMin"), _of(_any(3, 4), _given(1))),
    **dict.fromkeys(_names("ArgMax ArgMin"), _one(_any(3, 7), axis=1)),
    "CumProd": Recipe(operands=(_drawn(3, 4), _given(1, shape=()))),
    "CumSum": Recipe(operands=(_any(3, 4), _given(1, shape=()))),
    "TopK": Recipe(operands=(_any(3, 7), _given(2)), outputs=2),
}

_SEQUENCE = (3, 2, 4)  # steps, batch, features


def _recurrent(gates: int) -> Recipe:
    weights = (_drawn(1, gates * 5, size, low=-1, high=1) for size in (4, 5))
    return Recipe(operands=(_drawn(*_SEQUENCE), *weights), attributes={"hidden_size": 5}, outputs=2)


PRODUCTS: dict[str, Recipe] = {
    "Attention": _of(_drawn(1, 2, 3, 4), _drawn(1, 2, 5, 4), _drawn(1, 2, 5, 4), _any(3, 5)),
    "CausalConvWithState": Recipe(operands=(_drawn(1, 4, 6), _drawn(4, 1, 3), _drawn(4)), outputs=2),
    "Conv": _of(_IMAGE, _drawn(3, 4, 2, 3), _drawn(3)),
    "ConvInteger": _of(_any(1, 4, 5, 6), _any(3, 4, 2, 3), _given(3, shape=())),
    "ConvTranspose": _of(_IMAGE, _drawn(4, 3, 2, 3), _drawn(3)),
    "DeformConv": _of(_IMAGE, _drawn(3, 4, 2, 2), _drawn(1, 8, 4, 5, low=-0.9, high=0.9)),
    "Det": _one(_drawn(2, 3, 3)),
    "Einsum": _of(_drawn(3, 4), _drawn(4, 5), equation="ij,jk->ik"),
    "GRU": _recurrent(3),
    "Gemm": _of(_drawn(3, 4), _drawn(4, 5), _drawn(5)),
    "LSTM": _recurrent(4),
    "LinearAttention": Recipe(
        operands=(_drawn(1, 3, 8), _drawn(1, 3, 8), _drawn(1, 3, 8)),
        attributes={"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear"},
        outputs=2,
    ),
    "MatMul": _of(_drawn(3, 4), _drawn(4, 5)),
    "MatMulInteger": _of(_any(3, 4), _any(4, 5), _given(3, shape=())),
    "QLinearConv": _of(
        _any(1, 4, 5, 6), *[_given(0.5, shape=()), _given(3, shape=())], _any(3, 4, 2, 3),
        *[_given(0.1, shape=()), _given(0, shape=()), _given(20, shape=()), _given(5, shape=())],
    ),
    "QLinearMatMul": _of(
        _any(3, 4), *[_given(0.5, shape=()), _given(3, shape=())], _any(4, 5),
        *[_given(0.125, shape=()), _given(2, shape=()), _given(64, shape=()), _given(5, shape=())],
    ),
    "RNN": _recurrent(1),
    "RotaryEmbedding": _of(
        _drawn(1, 2, 3, 4), _drawn(6, 2), _drawn(6, 2), _given(0, 2, 5, shape=(1, 3), is_known=False)
    ),
}  # fmt: skip

WINDOWS: dict[str, Recipe] = {
    **dict.fromkeys(_names("GlobalAveragePool GlobalLpPool GlobalMaxPool"), _one(_IMAGE)),
    **dict.fromkeys(_names("AveragePool LpPool"), _one(_IMAGE, kernel_shape=[2, 3])),
    "AffineGrid": _of(_drawn(1, 2, 3), _given(1, 4, 5, 6)),
    "BatchNormalization": _of(_IMAGE, _SCALE, _drawn(4), _drawn(4), _SCALE),
    "Col2Im": _of(_drawn(1, 4, 6), _given(3, 4), _given(2, 2)),
    "GridSample": _of(_IMAGE, _drawn(1, 3, 3, 2, low=-0.9, high=0.9), mode="linear"),
    "GroupNormalization": _of(_IMAGE, _SCALE, _drawn(4), num_groups=2),
    "InstanceNormalization": _of(_IMAGE, _SCALE, _drawn(4)),
    "LRN": Recipe(operands=(_IMAGE,), attributes={"size": 3}, definition=partial(local_response, 3)),
    "LayerNormalization": _of(_drawn(3, 4), _SCALE, _drawn(4)),
    "LpNormalization": _one(_drawn(3, 4)),
    "MaxPool": _one(_any(1, 4, 5, 6), kernel_shape=[2, 3]),
    "MaxRoiPool": _of(_IMAGE, _given(0, 0, 0, 4, 3, shape=(1, 5)), pooled_shape=[2, 2]),
    "MaxUnpool": _of(
        _drawn(1, 1, 2, 2),
        _given(5, 7, 13, 15, shape=(1, 1, 2, 2), is_known=False),
        kernel_shape=[2, 2],
        strides=[2, 2],
    ),
    "MeanVarianceNormalization": _one(_IMAGE),
    "RMSNormalization": _of(_drawn(3, 4), _SCALE),
    "Resize": _of(_drawn(1, 2, 4, 5), None, _given(1, 1, 2, 2), mode="nearest"),
    "RoiAlign": _of(
        _IMAGE, _given(0, 0, 4, 3, shape=(1, 4)), _given(0), output_height=2, output_width=2, sampling_ratio=2
    ),
}

_DATA = _any(3, 4)

MOVEMENTS: dict[str, Recipe] = {
    "CenterCropPad": _of(_DATA, _given(2, 6)),
    "Compress": _of(_DATA, _given(1, 0, 1), axis=0),
    "Concat": _of(_DATA, _any(2, 4), axis=0),
    "DepthToSpace": _one(_any(1, 8, 2, 3), blocksize=2),
    "Expand": _of(_any(3, 1), _given(2, 3, 4)),
    "Gather": _of(_DATA, _given(2, 0, is_known=False), axis=0),
    "GatherElements": _of(_DATA, _given(2, 0, 1, 1, shape=(1, 4), is_known=False), axis=0),
    "GatherND": _of(_DATA, _given(2, 0, 1, 3, shape=(2, 2), is_known=False)),
    "Pad": _of(_DATA, _given(1, 2), _given(1, shape=()), _given(1)),
    "Reshape": _of(_DATA, _given(2, -1)),
    "ReverseSequence": _of(_DATA, _given(1, 3, 2, 3)),
    "ScatterElements": _of(_DATA, _given(2, 0, 1, 1, shape=(1, 4), is_known=False), _any(1, 4)),
    "ScatterND": _of(_DATA, _given(2, 0, shape=(2, 1), is_known=False), _any(2, 4)),
    "Slice": _of(_DATA, _given(3), _given(0), _given(1), _given(-1)),
    "SpaceToDepth": _one(_any(1, 2, 4, 6), blocksize=2),
    "Split": Recipe(operands=(_DATA, _given(1, 2)), outputs=2),
    "Squeeze": _of(_any(3, 1, 4), _given(1)),
    "TensorScatter": _of(_any(1, 2, 4, 3), _any(1, 2, 2, 3), _given(1)),
    "Tile": _of(_DATA, _given(2, 3)),
    "Trilu": _of(_DATA, _given(1, shape=())),
    "Unique": Recipe(operands=(_drawn(7),), outputs=4),
    "Unsqueeze": _of(_DATA, _given(0)),
}

_SCALAR_SIZE = {"T1": "int64"}

MADE: dict[str, Recipe] = {
    **dict.fromkeys(
        _names("BlackmanWindow HammingWindow HannWindow"),
        Recipe(operands=(_given(7, shape=()),), type_attributes={"T2": "output_datatype"}, fixed=_SCALAR_SIZE),
    ),
    "DFT": Recipe(operands=(_drawn(2, 6, 1), _given(5, shape=()), _given(1, shape=())), fixed={"T2": "int64"}),
    "EyeLike": Recipe(operands=(_DATA,), type_attributes={"T2": "dtype"}),
    "MelWeightMatrix": Recipe(
        operands=tuple(_given(value, shape=()) for value in (8, 16, 8000, 100, 3000)),
        type_attributes={"T3": "output_datatype"},
        fixed=_SCALAR_SIZE,
    ),
    "NegativeLogLikelihoodLoss": Recipe(
        operands=(_drawn(3, 5), _given(4, 0, 2, is_known=False), _SCALE), fixed={"Tind": "int64"}
    ),
    "NonMaxSuppression": _of(
        _given(0, 0, 1, 1, 0, 0.1, 1, 1.1, 2, 2, 3, 3, shape=(1, 3, 4), is_known=False),
        *[_given(0.9, 0.75, 0.6, shape=(1, 1, 3), is_known=False), _given(3), _given(0.5)],
    ),
    "OneHot": Recipe(
        operands=(_given(2, 0, 3, is_known=False), _given(5, shape=()), _given(0, 1)),
        fixed={"T1": "int64", "T2": "int64"},
    ),
    "Range": _of(*[_given(value, shape=()) for value in (1, 9, 2)]),
    "STFT": Recipe(operands=(_drawn(1, 16, 1), _given(4, shape=()), None, _given(8, shape=())), fixed={"T2": "int64"}),
    "SoftmaxCrossEntropyLoss": Recipe(
        operands=(_drawn(3, 5), _given(4, 0, 2, is_known=False), _drawn(5, low=0.5, high=2)), fixed={"Tind": "int64"}
    ),
}

RECIPES: Mapping[str, Recipe] = {**ELEMENTWISE, **CASTS, **REDUCTIONS, **PRODUCTS, **WINDOWS, **MOVEMENTS, **MADE}

NOT_TRIED: Mapping[str, str] = {
    **dict.fromkeys(_names("If Loop Scan SequenceMap"), "its types are those of the graphs in it"),
    **dict.fromkeys(
        _names(
            "ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt SequenceConstruct "
            "SequenceEmpty SequenceErase SequenceInsert SequenceLength SplitToSequence"
        ),
        "works on sequences or optional values",
    ),
    **dict.fromkeys(
        _names("Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike"), "draws at random"
    ),
    **dict.fromkeys(
        _names("ImageDecoder RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer"),
        "works on text or encoded images",
    ),
    **dict.fromkeys(_names("Constant ConstantOfShape"), "its type is that of an attribute's tensor"),
    **dict.fromkeys(_names("Scatter Upsample"), "not in recent operator sets"),
}
