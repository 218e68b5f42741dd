"""Which epilogues are fused, under which names, and where they end; that regions compute what the graph did."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.inline_composites import InlineComposites
from tests.support.quick_target import UNOPTIMISED
from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.graphs import decided, number, op, partition, patterns
from tvm_ext._tvm import assert_structural_equal, topi
from tvm_ext.byoc_cutlass.activations import ACTIVATIONS, KNOWN_REFERENCES, TOLERANCE
from tvm_ext.relay_passes.composites import is_composite
from tvm_ext.relay_passes.fold_calls import FoldCalls
from tvm_ext.relay_passes.legalize_floats import legalize_operators

Array = np.ndarray[Any, Any]
ROWS, COLUMNS, DEPTH = 24, 16, 8


def behind_a_product(*steps: Callable[[Any], Any], dtype: str = "float16") -> tvm.IRModule:
    """x @ w with ``steps`` behind it, each from a value to the next; what a step uses twice is bound first."""
    inputs = inputs_of((ROWS, DEPTH), (DEPTH, COLUMNS), dtype=dtype)
    builder = relax.BlockBuilder()
    with builder.function("main", inputs):
        with builder.dataflow():
            value = builder.emit(op.matmul(*inputs))
            for step in steps:
                value = builder.emit(step(value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return relax.transform.CanonicalizeBindings()(builder.get())


def erf_gelu(x: Any) -> Any:
    return op.multiply(op.multiply(x, op.add(op.erf(op.divide(x, number(math.sqrt(2)))), number(1))), number(0.5))


def erf_gelu_otherwise(x: Any) -> Any:
    half = op.multiply(op.erf(op.multiply(number(math.sqrt(0.5)), x)), number(0.5))
    return op.multiply(op.add(number(0.5), half), x)


def tanh_gelu(x: Any) -> Any:
    inner = op.add(x, op.multiply(number(0.044715), op.power(x, number(3))))
    tanh = op.tanh(op.multiply(number(math.sqrt(2 / math.pi)), inner))
    return op.multiply(op.multiply(x, number(0.5)), op.add(number(1), tanh))


def stable_softplus(x: Any) -> Any:
    return op.add(op.nn.relu(x), op.log(op.add(number(1), op.exp(op.negative(op.abs(x))))))


SPELLINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "relu as maximum": ("relu", lambda x: op.maximum(number(0), x)),
    "gelu": ("gelu", op.nn.gelu),
    "gelu by erf": ("gelu", erf_gelu),
    "gelu by erf, otherwise": ("gelu", erf_gelu_otherwise),
    "gelu by tanh": ("gelu_tanh", tanh_gelu),
    "silu": ("silu", lambda x: op.multiply(x, op.sigmoid(x))),
    "silu by exp": ("silu", lambda x: op.divide(x, op.add(number(1), op.exp(op.negative(x))))),
    "sigmoid by exp": ("sigmoid", lambda x: op.divide(number(1), op.add(number(1), op.exp(op.negative(x))))),
    "hardswish": ("hardswish", lambda x: op.divide(op.multiply(x, op.clip(op.add(x, number(3)), 0, 6)), number(6))),
    "softplus by exp": ("softplus", lambda x: op.log(op.add(op.exp(x), number(1)))),
    "stable softplus": ("softplus", stable_softplus),
    "mish": ("mish", lambda x: op.multiply(x, op.tanh(stable_softplus(x)))),
    "sigmoid by tanh": (
        "sigmoid",
        lambda x: op.multiply(number(0.5), op.add(number(1), op.tanh(op.multiply(x, number(0.5))))),
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_activation_is_known_however_it_is_spelt(spelling: str) -> None:
    name, step = SPELLINGS[spelling]
    (region,) = decided(behind_a_product(step)).taken
    assert [item.function for item in region.epilogue] == [name]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: op.multiply(x, op.add(op.erf(x), number(1))),  # no factor: neither form of GELU
        lambda x: op.log(op.add(op.exp(x), number(1.01))),
        lambda x: op.multiply(x, op.sigmoid(op.multiply(x, number(1.05)))),
    ],
)
def test_what_is_nearly_an_activation_is_none(step: Callable[[Any], Any]) -> None:
    (region,) = decided(behind_a_product(step)).taken
    assert not {item.function for item in region.epilogue} & {"gelu", "gelu_tanh", "softplus", "silu"}


def test_activations_lie_further_apart_than_the_tolerance() -> None:
    for name, values in KNOWN_REFERENCES.items():
        for other in set(ACTIVATIONS) - {name}:
            distance = np.abs(values - KNOWN_REFERENCES[other]) / np.maximum(1, np.abs(values))
            assert distance.max() > TOLERANCE, (name, other)


def leaf(*shape: int, dtype: str = "float16") -> Any:
    return relax.const(np.ones(shape, dtype), dtype)


@pytest.mark.parametrize(
    ("step", "pattern"),
    [
        (lambda x: op.add(x, leaf(COLUMNS)), "matmul_bias"),
        (lambda x: op.add(leaf(1, COLUMNS), x), "matmul_bias"),
        (lambda x: op.add(x, leaf(ROWS, 1)), "matmul_add"),
        (lambda x: op.add(x, leaf(ROWS, COLUMNS)), "matmul_residual_add"),
        (lambda x: op.multiply(leaf(ROWS, COLUMNS), x), "matmul_residual_multiply"),
        (lambda x: op.astype(x, "float32"), "matmul_cast"),
        (lambda x: op.clip(x, 0, 6), "matmul_clip"),
        (lambda x: op.nn.leakyrelu(x, 0.1), "matmul_leaky_relu"),
        (lambda x: op.sum(op.astype(x, "float32"), [0]), "matmul_cast_sum_rows"),
        (lambda x: op.max(op.astype(x, "float32"), [1], keepdims=True), "matmul_cast_max_columns"),
    ],
)
def test_single_steps(step: Callable[[Any], Any], pattern: str) -> None:
    assert patterns(behind_a_product(step)) == [pattern]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda x: op.nn.softmax(x), "relax.nn.softmax is no function of epilogues"),
        (lambda x: op.add(x, leaf(3, ROWS, COLUMNS)), "has another shape, (3, 24, 16) float16"),
        (lambda x: op.sum(x, [0]), "relax.sum of float16 would be added up by atomics, which want float32"),
        (lambda x: op.astype(x, "int8"), "gv is int8, and epilogues compute in float32"),
        (lambda x: op.matmul(x, leaf(COLUMNS, 8)), "gv is a product itself"),
        (lambda x: op.log(x), "goes on to no function that epilogues have"),
    ],
)
def test_where_an_epilogue_ends(step: Callable[[Any], Any], reason: str) -> None:
    region = decided(behind_a_product(step)).taken[0]
    assert reason in region.ended


def test_a_sum_of_everything_is_no_part_of_an_epilogue() -> None:
    (region,) = decided(behind_a_product(lambda x: op.sum(x, [0, 1]), dtype="float32")).taken
    assert "relax.sum runs over neither all rows nor all columns" in region.ended


def test_a_cast_is_left_to_a_sum_that_reads_the_narrow_values() -> None:
    (region,) = decided(behind_a_product(lambda x: op.sum(op.astype(x, "float32"), [0, 1]))).taken
    assert region.epilogue == ()
    assert region.ended == "the model: cast costs more in the epilogue than in the kernel that reads it"


def test_an_operand_of_a_part_of_the_rows_is_none_of_an_epilogue() -> None:
    x, w, scale = inputs_of((2, 24, 8), (8, 16), (2, 1, 16), dtype="float16")
    (region,) = decided(module_of([x, w, scale], op.multiply(op.matmul(x, w), scale))).taken
    assert region.epilogue == ()
    assert "its operand (2, 1, 16) float16 is repeated along a part of the rows" in region.ended


def used_twice(outputs: bool) -> tvm.IRModule:
    x, w = inputs_of((ROWS, DEPTH), (DEPTH, COLUMNS), dtype="float16")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            value = builder.emit(op.nn.relu(builder.emit(op.matmul(x, w))))
            both = [value, op.tanh(value)] if outputs else [op.nn.softmax(value), op.tanh(value)]
            results = [builder.emit_output(item) for item in both]
        builder.emit_func_output(relax.Tuple(results))
    return builder.get()


@pytest.mark.parametrize("outputs", [True, False])
def test_a_value_that_is_used_elsewhere_ends_the_epilogue(outputs: bool) -> None:
    (region,) = decided(used_twice(outputs)).taken
    assert region.pattern == "matmul_relu"
    assert region.ended.startswith("lv1 is used by ") or region.ended.startswith("gv is used by ")


def test_functions_that_importers_emit_are_known_by_what_they_compute() -> None:
    x, w = inputs_of((ROWS, DEPTH), (DEPTH, COLUMNS), dtype="float16")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            low = builder.emit_te(topi.maximum, builder.emit(op.matmul(x, w)), number(0), primfunc_name_hint="minimum")
            result = builder.emit_output(builder.call_te(topi.minimum, low, number(6), primfunc_name_hint="maximum"))
        builder.emit_func_output(result)
    cut, record = partition(builder.get())
    assert [region.pattern for region in record.taken] == ["matmul_relu_minimum"]
    assert {gv.name_hint for gv, _ in cut.functions_items()} == {"main", "cutlass_matmul_relu_minimum"}


def test_a_module_without_products_stays_and_going_back_gives_the_graph() -> None:
    (x,) = inputs_of((4, 4))
    plain = module_of([x], op.nn.relu(x))
    assert_structural_equal(partition(plain)[0]["main"], plain["main"])
    mod = behind_a_product(op.nn.relu, op.tanh)
    cut, _ = partition(mod)
    assert sum(is_composite(func) for _, func in cut.functions_items()) == 1
    assert_structural_equal(InlineComposites()(cut)["main"], mod["main"])


# ---- random graphs ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RandomGraph:
    """A float32 graph of products and element-wise steps, and its values in float64."""

    rng: np.random.Generator
    builder: relax.BlockBuilder
    known: list[tuple[Any, Array]] = field(default_factory=list)

    def constant(self, *shape: int) -> tuple[Any, Array]:
        array = self.rng.uniform(-1, 1, shape).astype(np.float32)
        return relax.const(array, "float32"), array.astype("f8")

    def keep(self, call: Any, array: Array) -> tuple[Any, Array]:
        self.known.append((self.builder.emit(call), array))
        return self.known[-1]

    def product(self, value: Any, array: Array) -> tuple[Any, Array]:
        """By weights, as they are or transposed, of a batch or not."""
        batch = array.shape[:-2] if self.rng.integers(3) == 0 else ()
        extents = (array.shape[-1], int(self.rng.integers(3, 9)))
        turned = bool(self.rng.integers(2))
        weight, numbers = self.constant(*batch, *(extents[::-1] if turned else extents))
        if turned:
            axes = [*range(len(batch)), len(batch) + 1, len(batch)]
            weight = self.builder.emit(op.permute_dims(weight, axes))
            numbers = np.swapaxes(numbers, -1, -2)
        return self.keep(op.matmul(value, weight), array @ numbers / 1.0)

    def step(self, value: Any, array: Array) -> tuple[Any, Array]:
        kind = int(self.rng.integers(8))
        if kind < 3:
            shape = [extent if self.rng.integers(2) else 1 for extent in array.shape]
            other, numbers = self.constant(*shape[int(self.rng.integers(len(shape))) :])
            makers = ((op.add, np.add), (op.multiply, np.multiply), (op.maximum, np.maximum))
            make, compute = makers[kind]
            return self.keep(make(value, other), compute(array, numbers))
        if kind == 3:  # a value from before: a residual where its shape fits
            fitting = [item for item in self.known if item[1].shape == array.shape]
            other, numbers = fitting[int(self.rng.integers(len(fitting)))]
            return self.keep(op.subtract(value, other), array - numbers)
        if kind == 4:
            sigmoid = self.builder.emit(op.sigmoid(value))
            return self.keep(op.multiply(value, sigmoid), array / (1 + np.exp(-array)))
        if kind == 5:
            return self.keep(op.mean(value, [len(array.shape) - 1], keepdims=True), array.mean(-1, keepdims=True))
        unary = ((op.nn.relu, lambda x: np.maximum(x, 0)), (op.tanh, np.tanh))[kind - 6]
        return self.keep(unary[0](value), unary[1](array))


def random_function(builder: relax.BlockBuilder, seed: int) -> tuple[str, Array, list[Array]]:
    """Adds function ``random<seed>`` of one input; its name, its input and its outputs in float64."""
    graph = RandomGraph(rng=np.random.default_rng(seed), builder=builder)
    shape = (2, 5, 6) if seed % 2 else (7, 6)
    given = graph.rng.uniform(-1, 1, shape).astype(np.float32)
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function(f"random{seed}", [x]):
        with builder.dataflow():
            value = graph.keep(op.tanh(x), np.tanh(given.astype("f8")))
            for _ in range(3):
                value = graph.product(*value)
                for _ in range(int(graph.rng.integers(1, 6))):
                    value = graph.step(*value)
                if graph.rng.integers(3) == 0:  # go on from an earlier value: what is there is used elsewhere
                    value = graph.known[int(graph.rng.integers(len(graph.known)))]
            results = [graph.known[-1], graph.known[len(graph.known) // 2]]
            outputs = [builder.emit_output(op.nn.relu(item)) for item, _ in results]
        builder.emit_func_output(relax.Tuple(outputs))
    return f"random{seed}", given, [np.maximum(array, 0) for _, array in results]


def computed(mod: tvm.IRModule, name: str, given: Array) -> list[Array]:
    """The outputs of a function: the computations of its operators by NumPy, in their own types, no kernel compiled."""
    bound = relax.transform.BindParams(name, {"x": tvm.runtime.tensor(given)})(mod)
    func = FoldCalls()(bound)[name]
    values = {binding.var: binding.value for block in func.body.blocks for binding in block.bindings}
    result = values.get(func.body.body, func.body.body)
    return [values.get(item, item).value.numpy() for item in result.fields]


def is_near(result: Array, wanted: Array) -> bool:
    return bool(np.linalg.norm(result - wanted) <= 2e-5 * max(1.0, float(np.linalg.norm(wanted))))


def test_regions_of_random_graphs_compute_what_the_graph_did() -> None:
    builder = relax.BlockBuilder()
    cases = [random_function(builder, seed) for seed in range(10)]
    cut, record = partition(relax.transform.DeadCodeElimination()(builder.get()))
    assert len(record.taken) > 20
    assert sum(len(region.epilogue) for region in record.taken) > 20
    back = InlineComposites()(cut)
    relax.analysis.well_formed(back)
    for name, given, expected in cases:
        for result, wanted in zip(computed(back, name, given), expected, strict=True):
            assert is_near(result, wanted), name


def test_regions_run_as_kernels() -> None:
    builder = relax.BlockBuilder()
    name, given, expected = random_function(builder, 3)
    cut, record = partition(relax.transform.DeadCodeElimination()(builder.get()))
    assert record.taken
    machine = relax.VirtualMachine(tvm.compile(legalize_operators()(InlineComposites()(cut)), UNOPTIMISED), tvm.cpu())
    for result, wanted in zip(machine[name](tvm.runtime.tensor(given)), expected, strict=True):
        assert is_near(result.numpy(), wanted)
