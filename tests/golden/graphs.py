"""Small graphs whose kernels are kept as hashes, for rows of the device tables: operators, layers and their chains."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from tests.support.recurrent_cells import CellCase, gru_after, gru_before, lstm, random_cell, rnn
from tests.support.small_modules import inputs_of, module_of
from tests.unit.chain_modules import Conv, conv_chain, gemm_chain
from tvm_ext._tvm import IRModule, PrimFunc
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.records.choice import CHOICE, TRUSTED_ARGUMENTS

op, nn = relax.op, relax.op.nn
WIDE, NARROW, ARM = "cpu-epyc-zen5", "cpu-cascade-lake-avx2", "cpu-neoverse-v1"
V100, T4, A100, H200, MI50 = "nvidia-v100", "nvidia-t4", "nvidia-a100", "nvidia-h200", "amd-mi50"
Graph = Callable[[], IRModule]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HashedKernels:
    """Kernels for the row ``device``; ``emit`` gives their text."""

    name: str
    device: str
    emit: Callable[[], str]

    def __str__(self) -> str:
        return f"{self.name}, {self.device}"


def text_of(module: IRModule) -> str:
    """TVMScript of all kernels, in the order of their names, without what is recorded of their choice and callers."""
    kernels = {var.name_hint: func for var, func in module.functions_items() if isinstance(func, PrimFunc)}
    return "\n".join(renumbered(str(_bare(kernels[name]).script())) for name in sorted(kernels))


def _bare(kernel: PrimFunc) -> PrimFunc:
    return kernel.without_attr(CHOICE).without_attr(TRUSTED_ARGUMENTS)


def renumbered(text: str) -> str:
    """Tensors' offsets numbered from the last parameter on: stock TVM's printer goes by where these lie in memory."""
    head, start, body = text.partition("\ndef ")
    found = list(dict.fromkeys(re.findall(r"elem_offset=(elem_offset(?:_\d+)?)\b", body)))[::-1]
    names = {name: f"elem_offset_{number}" if number else "elem_offset" for number, name in enumerate(found)}
    offset = re.compile(r"\belem_offset(?:_\d+)?\b(?!=)")
    return head + start + offset.sub(lambda match: names.get(match[0], match[0]), body)


def kernels_of(graph: Graph, device: str, **options: Any) -> str:
    """The text of the kernels that a build of ``graph`` for ``device`` constructs; nothing is compiled."""
    plan = plan_build(
        "opencl" if device.startswith("amd") else device,
        BuildOptions(device=device, database="off", check_machine_code=False, **options),
    )
    with plan.target:
        return text_of(plan.construct(graph()))


def hashed_graphs() -> Iterator[HashedKernels]:
    yield from (*_products(), *_convolutions(), *_windows(), *_rows(), *_attentions(), *_cells(), *_chains())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Operator:
    """``build`` of inputs of the given shapes, those of ``weights`` being constants."""

    build: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    weights: tuple[int, ...] = ()
    dtype: str = "float32"

    def __call__(self) -> IRModule:
        inputs = inputs_of(*self.shapes, dtype=self.dtype)
        generator = np.random.default_rng(0)
        values = [
            relax.const(generator.standard_normal(shape).astype(self.dtype)) if at in self.weights else inputs[at]
            for at, shape in enumerate(self.shapes)
        ]
        free = [item for at, item in enumerate(inputs) if at not in self.weights]
        result = self.build(*values)
        return module_of(free, *(result if isinstance(result, tuple) else (result,)))


def _on(devices: Sequence[str], graphs: dict[str, Graph], **options: Any) -> Iterator[HashedKernels]:
    for name, graph in graphs.items():
        for device in devices:
            yield HashedKernels(name=name, device=device, emit=partial(kernels_of, graph, device, **options))


def _shaped(build: Callable[..., Any], *shapes: tuple[int, ...], **how: Any) -> _Operator:
    return _Operator(build=build, shapes=shapes, **how)


# --- products ---------------------------------------------------------------------------------------------------------
def _gelu(x: Any, w: Any, b: Any) -> Any:
    return nn.gelu(op.add(op.matmul(x, w), b))


def _residual(x: Any, w: Any, b: Any, r: Any) -> Any:
    return op.add(nn.relu(op.add(op.matmul(x, w), b)), r)


def _turned(x: Any, w: Any) -> Any:
    return op.permute_dims(op.matmul(op.permute_dims(x), w))


def _by_transposed(x: Any, w: Any) -> Any:
    return op.matmul(x, op.permute_dims(w))


def _heads(x: Any, w: Any) -> Any:
    """A product whose rows become heads: the epilogue stores across."""
    return op.permute_dims(op.reshape(op.matmul(x, w), (2, 18, 4, 16)), [0, 2, 1, 3])


def _wide(x: Any, w: Any) -> Any:
    return op.matmul(x, w, out_dtype="float32")


def _products() -> Iterator[HashedKernels]:
    graphs: dict[str, Graph] = {
        "product": _shaped(op.matmul, (61, 92), (92, 75)),
        "dense gelu": _shaped(_gelu, (30, 64), (64, 52), (52,), weights=(1, 2)),
        "dense residual": _shaped(_residual, (33, 70), (70, 96), (96,), (33, 96), weights=(1, 2)),
    }
    cpu_graphs: dict[str, Graph] = {
        "product of one row": _shaped(op.matmul, (1, 300), (300, 500), weights=(1,)),
        "product of both turned": _shaped(_turned, (40, 36), (40, 50)),
        "product by transposed": _shaped(_by_transposed, (24, 130), (70, 130)),
        "batched product": _shaped(op.matmul, (6, 20, 33), (6, 33, 17)),
        "product into heads": _shaped(_heads, (36, 64), (64, 64), weights=(1,)),
        "thrashing product": _shaped(op.matmul, (256, 1024), (1024, 1024)),
        "product of long depth": _shaped(op.matmul, (16, 3000), (3000, 48), weights=(1,)),
        "integer product": _shaped(op.matmul, (20, 40), (40, 24), dtype="int32"),
        "double product": _shaped(op.matmul, (20, 40), (40, 24), dtype="float64"),
        "half product": _shaped(op.matmul, (20, 40), (40, 24), dtype="float16", weights=(1,)),
    }
    half: dict[str, Graph] = {
        "half product": _shaped(op.matmul, (128, 160), (160, 64), dtype="float16"),
        "half product to float": _shaped(_wide, (64, 72), (72, 48), dtype="float16"),
        "half batched product": _shaped(op.matmul, (4, 64, 64), (4, 64, 32), dtype="float16"),
        "half dense gelu": _shaped(_gelu, (64, 128), (128, 64), (64,), weights=(1, 2), dtype="float16"),
        "half product by transposed": _shaped(_by_transposed, (64, 128), (32, 128), dtype="float16"),
        "half product of odd sizes": _shaped(op.matmul, (60, 90), (90, 41), dtype="float16"),
    }
    yield from _on((WIDE, NARROW, ARM), graphs)
    yield from _on((WIDE, NARROW), cpu_graphs)
    yield from _on((V100, MI50), graphs)
    yield from _on((V100, T4, A100), half)
    yield from _on((A100,), {"bfloat16 product": _shaped(op.matmul, (64, 96), (96, 64), dtype="bfloat16")})
    pipelined: dict[str, Graph] = {
        "pipelined half product": _shaped(op.matmul, (128, 1024), (1024, 128), dtype="float16"),
        "pipelined product": _shaped(op.matmul, (128, 512), (512, 96)),
    }
    yield from _on((V100, A100, H200), pipelined, enable_pipelining=True)
    bulk = {"bulk half product": half["half product"], "bulk product": _shaped(op.matmul, (64, 72), (72, 64))}
    yield from _on((H200,), bulk, enable_pipelining=True, bulk_copies=True)


# --- convolutions -----------------------------------------------------------------------------------------------------
def _convolved(**how: Any) -> Callable[..., Any]:
    return lambda x, w, b: nn.relu(op.add(nn.conv2d(x, w, **how), b))


def _convolution(image: tuple[int, ...], weights: tuple[int, ...], dtype: str = "float32", **how: Any) -> _Operator:
    return _shaped(_convolved(**how), image, weights, (1, weights[0], 1, 1), weights=(1, 2), dtype=dtype)


def _convolutions() -> Iterator[HashedKernels]:
    graphs: dict[str, Graph] = {
        "convolution": _convolution((1, 32, 15, 17), (32, 32, 3, 3), padding=1),
        "strided convolution": _convolution((1, 16, 20, 22), (32, 16, 3, 3), strides=2, padding=1),
        "1x1 convolution": _convolution((2, 32, 14, 14), (48, 32, 1, 1)),
    }
    cpu_graphs: dict[str, Graph] = {
        "first convolution": _convolution((1, 3, 33, 65), (16, 3, 7, 7), strides=2, padding=3),
        "grouped convolution": _convolution((1, 32, 12, 12), (64, 8, 3, 3), groups=4, padding=1),
        "dilated convolution": _convolution((1, 16, 20, 20), (16, 16, 3, 3), dilation=3, padding=3),
        "convolution of odd channels": _convolution((1, 5, 13, 11), (7, 5, 3, 3), padding=1),
        "strided 1x1 convolution": _convolution((1, 64, 14, 14), (32, 64, 1, 1), strides=2),
        "convolution of one row": _shaped(
            lambda x, w: nn.conv1d(x, w, padding=2), (1, 12, 60), (20, 12, 5), weights=(1,)
        ),
        "volume": _shaped(lambda x, w: nn.conv3d(x, w, padding=1), (1, 8, 6, 9, 9), (12, 8, 3, 3, 3), weights=(1,)),
        "transposed convolution": _shaped(
            lambda x, w: nn.conv2d_transpose(x, w, strides=2, padding=1), (1, 16, 9, 9), (16, 8, 4, 4), weights=(1,)
        ),
    }
    half: dict[str, Graph] = {
        "half convolution": _convolution((1, 32, 14, 14), (32, 32, 3, 3), "float16", padding=1),
        "half strided convolution": _convolution((2, 16, 15, 15), (32, 16, 3, 3), "float16", strides=2, padding=1),
    }
    yield from _on((WIDE, NARROW), graphs | cpu_graphs)
    blocked = {f"blocked {name}": graph for name, graph in graphs.items()}
    blocked["blocked groups"] = cpu_graphs["grouped convolution"]
    yield from _on((WIDE, NARROW), blocked, layout="NCHWc")
    squares: Graph = lambda: conv_chain((1, 32, 27, 34), *[Conv(filters=32, kernel=3, padding=1)] * 3).mod  # noqa: E731
    apart = {"layout": "NCHWc", "enable_persistent_fusion": False}
    yield from _on((WIDE, NARROW), {"Winograd": squares}, **apart)
    yield from _on((WIDE,), {"fast Winograd": squares}, winograd="fast", **apart)
    yield from _on((V100, MI50), graphs)
    yield from _on((V100, A100, H200), half)
    yield from _on((A100,), {"grouped convolution": cpu_graphs["grouped convolution"]})


# --- windows ----------------------------------------------------------------------------------------------------------
_SEPARABLE = (
    Conv(filters=32, kernel=1), Conv(filters=32, kernel=3, padding=1, groups=32), Conv(filters=16, kernel=3, padding=1)
)  # fmt: skip


def _halving(conv: Conv) -> Conv:
    return replace(conv, stride=2 if conv.kernel > 1 else 1)


def _windows() -> Iterator[HashedKernels]:
    def depthwise(channels: int, size: int, kernel: int, **how: Any) -> _Operator:
        return _convolution((1, channels, size, size), (channels, 1, kernel, kernel), groups=channels, **how)

    graphs: dict[str, Graph] = {
        "depthwise": depthwise(24, 15, 3, padding=1),
        "strided depthwise": depthwise(17, 22, 5, strides=2, padding=2),
        "max pool": _shaped(lambda x: nn.max_pool2d(x, (3, 3), (2, 2), padding=(1, 1)), (1, 20, 19, 23)),
        "average pool": _shaped(lambda x: nn.avg_pool2d(x, (3, 3), (1, 1), padding=(1, 1)), (1, 4, 13, 21)),
    }
    cpu_graphs: dict[str, Graph] = {
        "dilated depthwise": depthwise(16, 20, 3, dilation=2, padding=2),
        "pool past the end": _shaped(
            lambda x: nn.max_pool2d(x, (2, 2), (2, 2), ceil_mode=True), (2, 6, 15, 15), dtype="float64"
        ),
        "pool of one axis": _shaped(lambda x: nn.max_pool1d(x, 4, 3), (2, 8, 50)),
        "pool of volumes": _shaped(lambda x: nn.avg_pool3d(x, (2, 2, 2), (2, 2, 2)), (1, 4, 8, 8, 8)),
        "depthwise of tall windows": depthwise(16, 9, 7, padding=3),
        "global pool": _shaped(lambda x: nn.adaptive_avg_pool2d(x, (1, 1)), (1, 40, 7, 7)),
        "depthwise and 1x1": lambda: (
            conv_chain((1, 16, 28, 28), Conv(filters=16, kernel=3, padding=1, groups=16), Conv(filters=24)).mod
        ),
    }
    yield from _on((WIDE, NARROW), graphs | cpu_graphs)
    blocks: dict[str, Graph] = {
        "blocked windows": lambda: conv_chain((1, 24, 20, 20), *_SEPARABLE).mod,
        "blocked strided windows": lambda: conv_chain((1, 24, 21, 21), *map(_halving, _SEPARABLE)).mod,
    }
    yield from _on((WIDE, NARROW), blocks, layout="NCHWc", enable_persistent_fusion=False, winograd="off")
    yield from _on((A100,), graphs)


# --- rows -------------------------------------------------------------------------------------------------------------
def _norm(x: Any, scale: Any, shift: Any) -> Any:
    return nn.layer_norm(x, scale, shift, axes=[-1])


def _functions(x: Any) -> Any:
    return op.add(op.tanh(x), op.multiply(op.erf(x), op.log(op.add(op.sigmoid(x), op.exp(x)))))


def _rows() -> Iterator[HashedKernels]:
    graphs: dict[str, Graph] = {
        "softmax": _shaped(nn.softmax, (12, 203)),
        "softmax across": _shaped(lambda x: nn.softmax(x, axis=1), (3, 20, 45)),
        "layer norm": _shaped(_norm, (40, 192), (192,), (192,), weights=(1, 2)),
        "sum of all": _shaped(op.sum, (3, 5, 7000)),
        "mean of columns": _shaped(lambda x: op.mean(x, axis=[0]), (130, 70)),
        "functions": _shaped(_functions, (50, 203)),
        "index of the largest": _shaped(lambda x: op.argmax(x, axis=-1), (9, 77)),
    }
    cpu_graphs: dict[str, Graph] = {
        "double softmax": _shaped(nn.softmax, (12, 40), dtype="float64"),
        "half functions": _shaped(_functions, (30, 64), dtype="float16"),
        "largest of integers": _shaped(lambda x: op.max(x, axis=-1), (30, 50), dtype="int32"),
        "half sums of columns": _shaped(lambda x: op.sum(x, axis=[1]), (6, 40, 5), dtype="float16"),
        "product of rows": _shaped(lambda x: op.prod(x, axis=[1]), (6, 40, 5)),
        "two outputs": _shaped(lambda x, y: (op.add(x, y), op.exp(op.add(x, y))), (40, 30), (40, 30)),
        "instance norm": _shaped(
            lambda x, s, b: nn.instance_norm(x, s, b, channel_axis=1, axes=[2, 3]), (2, 6, 15, 15), (6,), (6,)
        ),
    }
    moves: dict[str, Graph] = {
        "norm of two axes": _shaped(lambda x: op.std(x, axis=[0, 2]), (6, 40, 5)),
        "log softmax": _shaped(nn.log_softmax, (12, 203)),
        "concatenation": _shaped(lambda x, y: nn.relu(op.concat([x, y], axis=1)), (4, 30, 9), (4, 17, 9)),
        "gather": _shaped(lambda x: op.take(x, relax.const(np.array([3, 1, 7])), axis=1), (20, 9, 33)),
        "running sum": _shaped(lambda x: op.cumsum(x, axis=1), (7, 61)),
        "transpose": _shaped(lambda x: op.permute_dims(op.add(x, x)), (70, 90)),
        "resize": _shaped(lambda x: op.image.resize2d(x, (20, 24), layout="NCHW", method="linear"), (1, 6, 10, 12)),
        "borders": _shaped(lambda x: nn.pad(op.tanh(x), (0, 0, 2, 3, 1, 0)), (3, 11, 20)),
    }
    yield from _on((WIDE, NARROW), graphs | cpu_graphs)
    yield from _on((WIDE,), moves)
    few: dict[str, Graph] = {
        "softmax of one row": _shaped(nn.softmax, (1, 1 << 20)),
        "functions of one sum": _shaped(lambda x: op.tanh(op.sum(op.exp(x), axis=[1])), (2, 1 << 18)),
    }
    yield from _on((A100,), graphs | moves | few)
    half: dict[str, Graph] = {
        "half softmax": _shaped(nn.softmax, (12, 200), dtype="float16"),
        "half layer norm": _shaped(_norm, (16, 768), (768,), (768,), dtype="float16"),
    }
    yield from _on((A100,), half)


# --- attention, recurrent cells, chains -------------------------------------------------------------------------------
def _attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
    scores = op.multiply(op.matmul(query, op.permute_dims(key, [0, 1, 3, 2])), relax.const(np.float32(0.25)))
    return op.matmul(nn.softmax(op.add(scores, mask)), value)


def _attentions() -> Iterator[HashedKernels]:
    def shapes(queries: int, keys: int, features: int, values: int) -> tuple[tuple[int, ...], ...]:
        lead = (2, 3)
        return (
            (*lead, queries, features), (*lead, keys, features), (*lead, keys, values), (2, 1, 1, keys)
        )  # fmt: skip

    graphs: dict[str, Graph] = {
        "attention": _shaped(_attention, *shapes(33, 48, 16, 16)),
        "attention of one query": _shaped(_attention, *shapes(1, 100, 40, 24)),
        "attention of long keys": _shaped(_attention, *shapes(64, 300, 32, 32)),
    }
    yield from _on((WIDE, NARROW), graphs, enable_persistent_fusion=True)


def _cells() -> Iterator[HashedKernels]:
    cases: tuple[CellCase, ...] = (
        lstm(24, 1), lstm(33, 4, holes=True), lstm(16, 2, clip=1.0), gru_after(20, 3), gru_before(20, 3), rnn(48, 1),
        *map(random_cell, range(6)),
    )  # fmt: skip
    yield from _on((WIDE, NARROW), {case.name: partial(_as_main, case) for case in cases})


def _as_main(case: CellCase) -> IRModule:
    """The cell's operators in ``main``, as an importer leaves them, its weights constants."""
    return _Operator(
        build=lambda *inputs: tuple(case.compute(op, *inputs)),
        shapes=case.shapes, weights=case.weights, dtype=case.dtype,
    )()  # fmt: skip


def _chains() -> Iterator[HashedKernels]:
    graphs: dict[str, Graph] = {
        "chain of products": lambda: gemm_chain(64, (32, 48, 24), ("bias relu", "bias tanh"), residual=True).mod,
        "chain of batched products": lambda: gemm_chain((3, 31), (17, 48, 8), ("silu", "bias")).mod,
    }
    cpu_graphs: dict[str, Graph] = {
        "3x3 and 1x1": lambda: (
            conv_chain((1, 8, 24, 24), Conv(filters=16, kernel=3, padding=1), Conv(filters=32), residual=True).mod
        ),
        "strided and 1x1": lambda: (
            conv_chain((1, 12, 21, 21), Conv(filters=24, kernel=3, stride=2), Conv(filters=8), Conv(filters=20)).mod
        ),
    }
    yield from _on((WIDE, NARROW), graphs | cpu_graphs, enable_persistent_fusion=True)
    yield from _on((A100, V100), graphs, enable_persistent_fusion=True)
