"""Small sound models of many operators, from which mutated ones are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper, parser

Constant: TypeAlias = "tuple[int, ...] | npt.NDArray[np.generic]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seed:
    """``text`` in ONNX's notation; ``constants``: values, or as tuples the shapes of random weights."""

    name: str
    text: str
    constants: Mapping[str, Constant]
    opset: int

    def model(self) -> onnx.ModelProto:
        model: onnx.ModelProto = parser.parse_model(
            f'<ir_version: 10, opset_import: ["": {self.opset}, "local": 1]>\n{self.name} {self.text}'
        )
        generator = np.random.default_rng(len(self.name))
        for name, constant in self.constants.items():
            value = constant if isinstance(constant, np.ndarray) else generator.random(constant, dtype="float32")
            model.graph.initializer.append(numpy_helper.from_array(value, name))
        return model


def _integers(*values: int) -> npt.NDArray[np.int64]:
    return np.asarray(values, "int64")


def _seed(name: str, text: str, opset: int = 18, **constants: Constant) -> Seed:
    return Seed(name=name, text=text, constants=constants, opset=opset)


CONVOLUTIONS = _seed(
    "convolutions",
    """(float[1,3,12,12] x) => (float[1,10] y) {
        c = Conv <pads = [1,1,1,1], strides = [2,2], kernel_shape = [3,3]> (x, w1, b1)
        n = BatchNormalization <epsilon = 0.001> (c, scale, shift, mean, var)
        r = Relu (n)
        d = Conv <group = 8, dilations = [1,1], auto_pad = "SAME_UPPER"> (r, w2)
        p = MaxPool <kernel_shape = [2,2], strides = [2,2], ceil_mode = 1> (d)
        a = AveragePool <kernel_shape = [2,2], pads = [0,0,1,1], count_include_pad = 1> (p)
        s = Add (p, a)
        g = GlobalAveragePool (s)
        f = Flatten <axis = 1> (g)
        l = Gemm <transB = 1, alpha = 0.5> (f, w3, b3)
        y = Softmax <axis = -1> (l)
    }""",
    w1=(8, 3, 3, 3), b1=(8,), scale=(8,), shift=(8,), mean=(8,), var=(8,), w2=(8, 1, 3, 3), w3=(10, 8), b3=(10,),
)  # fmt: skip

TRANSFORMER = _seed(
    "transformer",
    """(float[2,6,16] x) => (float[2,6,16] y) {
        n = LayerNormalization <axis = -1, epsilon = 0.00001> (x, gamma, beta)
        p = MatMul (n, wqkv)
        q, k, v = Split <axis = 2, num_outputs = 3> (p)
        q4 = Reshape (q, heads)
        k4 = Reshape (k, heads)
        v4 = Reshape (v, heads)
        qt = Transpose <perm = [0,2,1,3]> (q4)
        kt = Transpose <perm = [0,2,3,1]> (k4)
        vt = Transpose <perm = [0,2,1,3]> (v4)
        s = MatMul (qt, kt)
        o = Softmax <axis = 3> (s)
        m = MatMul (o, vt)
        t = Transpose <perm = [0,2,1,3]> (m)
        j = Reshape (t, joined)
        r = Add (j, x)
        e = Erf (r)
        h = Mul (r, e)
        z = ReduceMean <keepdims = 1> (h, last)
        y = Sub (h, z)
    }""",
    gamma=(16,), beta=(16,), wqkv=(16, 48), heads=_integers(0, 0, 4, 4), joined=_integers(0, 0, -1), last=_integers(-1),
)  # fmt: skip

SHAPES = _seed(
    "shapes",
    """(float[2,3,4] x) => (float[6,8] y, int64[5] z) {
        s = Shape (x)
        a = Gather <axis = 0> (s, zero)
        b = Gather <axis = 0> (s, one)
        m = Mul (a, b)
        t = Concat <axis = 0> (m, minus)
        r = Reshape (x, t)
        e = Tile (r, repeats)
        w = ConstantOfShape (extents)
        c = Expand (w, extents)
        d = Add (e, c)
        p = Pad <mode = "constant"> (d, pads)
        l = Slice (p, starts, ends, axes, steps)
        u = Unsqueeze (l, axes)
        y = Squeeze (u, axes)
        g = Range (first, limit, by)
        z = Identity (g)
    }""",
    zero=_integers(0), one=_integers(1), minus=_integers(-1), repeats=_integers(1, 2), extents=_integers(6, 8),
    pads=_integers(0, 1, 0, 1), starts=_integers(1), ends=_integers(9), axes=_integers(1), steps=_integers(1),
    first=np.asarray(0), limit=np.asarray(10), by=np.asarray(2),
)  # fmt: skip

IMAGES = _seed(
    "images",
    """(float[1,4,6,6] x) => (float[1,4,12,12] y, float[1,1,12,12] z) {
        r = Resize <mode = "linear"> (x, , scales)
        d = DepthToSpace <blocksize = 2, mode = "DCR"> (x)
        c = ConvTranspose <strides = [2,2], pads = [0,0,0,0], output_padding = [0,0]> (x, wt)
        y = Add (r, c)
        i = InstanceNormalization (d, one, none)
        k = LRN <size = 3> (i)
        z = PRelu (k, slope)
    }""",
    wt=(4, 4, 2, 2), one=(1,), none=(1,), slope=(1,), scales=np.asarray([1, 1, 2, 2], "float32"),
)  # fmt: skip

INDICES = _seed(
    "indices",
    """(float[4,6] x, int64[3] i) => (float[2,6] v, float[3,6] g, float[3,5] o, float[4,6] w, float[3,6] q) {
        v, unread = TopK <axis = 0, largest = 1> (x, k)
        g = Gather <axis = 0> (x, i)
        o = OneHot <axis = -1> (i, depth, onoff)
        b = Greater (x, limit)
        n = CumSum <reverse = 1> (x, axis)
        w = Where (b, x, n)
        h = GatherElements <axis = 1> (g, places)
        q = ScatterND (h, where, updates)
        a = ArgMax <axis = 1, keepdims = 0> (x)
    }""",
    limit=(1,), onoff=(2,), updates=(2, 6), k=_integers(2), depth=np.asarray(5), axis=np.asarray(0),
    places=np.arange(18).reshape(3, 6) % 6, where=_integers(0, 2).reshape(2, 1),
)  # fmt: skip

RECURRENT = _seed(
    "recurrent",
    """(float[2,5] x, float[2,5] h) => (float[2,5] n, float[1] l) {
        g = Gemm (x, wi, bi)
        r = Gemm (h, wr)
        s = Sum (g, r, x)
        z = Sigmoid (s)
        t = Tanh (s)
        i = HardSigmoid <alpha = 0.2> (t)
        m = Max (z, i, h)
        c = Clip (m, low, high)
        p = Pow (c, two)
        n = Mean (p, z)
        e = Einsum <equation = "ij,ij->i"> (n, t)
        l = ReduceLogSumExp <keepdims = 1> (e)
    }""",
    wi=(5, 5), bi=(5,), wr=(5, 5), low=(), high=(), two=(),
)  # fmt: skip

QUANTIZED = _seed(
    "quantized",
    """(float[1,2,6,6] x) => (float[1,4,4,4] y, float[1,2,6,6] z) {
        q = QuantizeLinear (x, step, point)
        w = QuantizeLinear (weight, step, point)
        c = QLinearConv (q, step, point, w, step, point, step, point)
        y = DequantizeLinear (c, step, point)
        d = Cast <to = 10> (x)
        m = Mul (d, d)
        z = Cast <to = 1> (m)
    }""",
    weight=(4, 2, 3, 3), step=np.asarray(0.05, "float32"), point=np.asarray(120, "uint8"),
)  # fmt: skip

BRANCHES = _seed(
    "branches",
    """(float[3,4] x, bool which) => (float[3,4] y) {
        a = Abs (x)
        b = If (which) <
            then_branch = yes () => (float[3,4] t) { t = Mul (a, x) },
            else_branch = no () => (float[3,4] e) { s = Sqrt (a) e = Add (s, x) }
        >
        y = Neg (b)
    }""",
)

SIGNALS = _seed(
    "signals",
    """(float[1,16,1] x) => (float[1,9,2] y, float[1,16,1] z) {
        y = DFT <onesided = 1> (x, , axis)
        w = HannWindow <periodic = 1> (length)
        u = Reshape (w, column)
        z = Mul (x, u)
    }""",
    opset=20,
    axis=np.asarray(1), length=np.asarray(16), column=_integers(1, 16, 1),
)  # fmt: skip

FUNCTIONS = _seed(
    "functions",
    """(float[4,6] x) => (float[4,6] y) {
        a = local.twice (x)
        b = local.scaled <factor = 3.0> (a)
        y = Relu (b)
    }
    <domain: "local", opset_import: ["": 18, "local": 1]>
    twice (p) => (q) { q = local.scaled <factor = 2.0> (p) }
    <domain: "local", opset_import: ["": 18]>
    scaled <factor> (p) => (q) {
        c = Constant <value_float: float = @factor> ()
        q = Mul (p, c)
    }""",
)

SEEDS = (
    CONVOLUTIONS, TRANSFORMER, SHAPES, IMAGES, INDICES, RECURRENT, QUANTIZED, BRANCHES, SIGNALS, FUNCTIONS,
)  # fmt: skip
