"""Chains of products as Relax modules, random ones too, and what they compute in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm

from tests.unit.kernels import relative_error
from tests.unit.tir_passes.emit.simt_operators import convolved
from tvm_ext import relay
from tvm_ext._tvm import IRModule, relax

Array = npt.NDArray[Any]
TOLERANCE = 2e-6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainModule:
    """A module whose ``main`` is a chain of products, and its meaning in float64."""

    mod: IRModule
    inputs: tuple[tuple[int, ...], ...]
    reference: Callable[..., Array]

    def arguments(self, seed: int = 0) -> list[Array]:
        generator = np.random.default_rng(seed)
        return [generator.standard_normal(shape).astype("float32") for shape in self.inputs]

    def expected(self, arguments: Sequence[Array]) -> Array:
        return self.reference(*(item.astype("float64") for item in arguments))


# --- epilogues: name -> (Relax, NumPy) of the value and its bias ------------------------------------------------------
Epilogue = tuple[Callable[[Any, Any], Any], Callable[[Array, Array], Array]]

EPILOGUES: dict[str, Epilogue] = {
    "none": (lambda x, _: x, lambda x, _: x),
    "relu": (lambda x, _: relax.op.nn.relu(x), lambda x, _: np.maximum(x, 0)),
    "bias": (lambda x, b: relax.op.add(x, b), lambda x, b: x + b),
    "bias relu": (lambda x, b: relax.op.nn.relu(relax.op.add(x, b)), lambda x, b: np.maximum(x + b, 0)),
    "silu": (lambda x, _: relax.op.nn.silu(x), lambda x, _: x / (1 + np.exp(-x))),
    "bias tanh": (lambda x, b: relax.op.tanh(relax.op.add(x, b)), lambda x, b: np.tanh(x + b)),
}


class _Writer:
    """Emits operators one by one, keeping the same in NumPy."""

    def __init__(self, generator: np.random.Generator, *inputs: tuple[int, ...]) -> None:
        self.generator = generator
        self.builder = relax.BlockBuilder()
        self.inputs = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(inputs)]
        self.steps: list[Callable[[Array, Sequence[Array]], Array]] = []

    def constant(self, *shape: int) -> tuple[Any, Array]:
        fan_in = int(np.prod(shape[1:])) if len(shape) == 4 else shape[0]
        value = (self.generator.standard_normal(shape) / max(1.0, fan_in) ** 0.5).astype("float32")
        return relax.const(value), value.astype("float64")

    def epilogue(self, value: Any, name: str, shape: tuple[int, ...]) -> Any:
        symbolic, numeric = EPILOGUES[name]
        bias, numbers = self.constant(*shape)
        self.steps.append(lambda x, _: numeric(x, numbers))
        result = symbolic(value, bias)
        return value if result is value else self.builder.emit(result)

    def add_input(self, value: Any, position: int) -> Any:
        self.steps.append(lambda x, inputs: x + inputs[position])
        return self.builder.emit(relax.op.add(value, self.inputs[position]))


def _chain(writer: _Writer, write: Callable[[_Writer], Any]) -> ChainModule:
    with writer.builder.function("main", writer.inputs):
        with writer.builder.dataflow():
            result = writer.builder.emit_output(write(writer))
        writer.builder.emit_func_output(result)

    def reference(*inputs: Array) -> Array:
        value = inputs[0]
        for step in writer.steps:
            value = step(value, inputs)
        return value

    shapes = tuple(tuple(int(size) for size in var.ty.shape.values) for var in writer.inputs)
    return ChainModule(mod=writer.builder.get(), inputs=shapes, reference=reference)


def gemm_chain(
    rows: int | tuple[int, ...],
    sizes: Sequence[int],
    epilogues: Sequence[str] = (),
    residual: bool = False,
    seed: int = 0,
) -> ChainModule:
    """``x @ w0 @ w1 ...`` through ``sizes``, an epilogue behind each; ``residual`` adds another input at the end."""
    lead = (rows,) if isinstance(rows, int) else rows
    names = [*epilogues, *["relu"] * len(sizes)]
    shapes = [(*lead, sizes[0]), *([(*lead, sizes[-1])] if residual else [])]

    def write(writer: _Writer) -> Any:
        value = writer.inputs[0]
        for depth, columns, name in zip(sizes, sizes[1:], names, strict=False):
            weight, numbers = writer.constant(depth, columns)
            writer.steps.append(lambda x, _, w=numbers: x @ w)
            value = writer.epilogue(writer.builder.emit(relax.op.matmul(value, weight)), name, (columns,))
        return writer.add_input(value, 1) if residual else value

    return _chain(_Writer(np.random.default_rng(seed), *shapes), write)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conv:
    """A convolution, its window a square."""

    filters: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    epilogue: str = "bias relu"


def conv_chain(shape: tuple[int, int, int, int], *convs: Conv, residual: bool = False, seed: int = 0) -> ChainModule:
    """NCHW convolutions, one after the other; ``residual`` adds another input of the result's shape at the end."""
    n, _, h, w = shape
    for conv in convs:
        h, w = (_size(size, conv) for size in (h, w))
    shapes = [shape, *([(n, convs[-1].filters, h, w)] if residual else [])]

    def write(writer: _Writer) -> Any:
        value, channels = writer.inputs[0], shape[1]
        for conv in convs:
            weight, numbers = writer.constant(conv.filters, channels // conv.groups, conv.kernel, conv.kernel)
            call = relax.op.nn.conv2d(
                value, weight, strides=conv.stride, padding=conv.padding, dilation=conv.dilation, groups=conv.groups
            )
            writer.steps.append(
                lambda x, _, w=numbers, c=conv: convolved(x, w, c.stride, c.padding, c.dilation, c.groups)
            )
            value = writer.epilogue(writer.builder.emit(call), conv.epilogue, (1, conv.filters, 1, 1))
            channels = conv.filters
        return writer.add_input(value, 1) if residual else value

    return _chain(_Writer(np.random.default_rng(seed), *shapes), write)


def _size(size: int, conv: Conv) -> int:
    return (size + 2 * conv.padding - conv.dilation * (conv.kernel - 1) - 1) // conv.stride + 1


# --- random ones ------------------------------------------------------------------------------------------------------
ROWS = (1, 2, 3, 7, 31, 64, 97, 128, 211, 500)
SIZES = (1, 2, 3, 5, 8, 16, 17, 33, 48, 64, 100)


def random_gemm_chain(seed: int) -> ChainModule:
    """Two to four products of odd sizes with any epilogues; every third one is of matrices in a batch."""
    generator = np.random.default_rng(seed)
    length = int(generator.integers(2, 5))
    rows = int(generator.choice(ROWS))
    sizes = [int(generator.choice(SIZES)) for _ in range(length + 1)]
    names = [str(generator.choice(list(EPILOGUES))) for _ in range(length)]
    lead = (int(generator.integers(1, 4)), rows) if seed % 3 == 0 else rows
    return gemm_chain(lead, sizes, names, residual=bool(generator.integers(2)), seed=seed)


def random_conv_chain(seed: int) -> ChainModule:
    """A convolution of any window followed by one to three 1x1 ones."""
    generator = np.random.default_rng(seed)
    names = list(EPILOGUES)
    kernel, groups = int(generator.choice([1, 2, 3, 5])), int(generator.choice([1, 1, 2, 4]))
    first = Conv(
        filters=4 * int(generator.integers(1, 13)),
        kernel=kernel,
        stride=int(generator.choice([1, 1, 2, 3])),
        padding=int(generator.integers(0, kernel)),
        dilation=int(generator.choice([1, 1, 2])),
        groups=groups,
        epilogue=str(generator.choice(names)),
    )
    others = [
        Conv(filters=int(generator.choice([3, 8, 16, 24, 32, 48])), epilogue=str(generator.choice(names)))
        for _ in range(int(generator.integers(1, 4)))
    ]
    shape = (int(generator.integers(1, 4)), 4 * int(generator.integers(1, 9)), *map(int, generator.integers(11, 33, 2)))
    return conv_chain(shape, first, *others, residual=bool(generator.integers(2)), seed=seed)


# --- checked builds ---------------------------------------------------------------------------------------------------
def check(chain: ChainModule, fused: int | None = None, **options: Any) -> Any:
    """Build ``chain`` with all its links fused, run it, compare; its report."""
    library = relay.build(chain.mod, enable_persistent_fusion=True, **options)
    arguments = chain.arguments()
    module = relay.GraphModule(library["default"](tvm.cpu()))
    module.run(**{f"x{i}": value for i, value in enumerate(arguments)})
    assert relative_error(module.get_output(0).numpy(), chain.expected(arguments)) < TOLERANCE
    record = library.report.persistent
    kernels = record.fused if record is not None else ()
    if fused is not None:
        assert [len(region.operators) for region in kernels] == ([fused] if fused else [])
    chains = {region.kernel for region in kernels}
    assert all(
        "a chain in" in operator.choice.reason for operator in library.report.operators if operator.name in chains
    )
    return library.report
