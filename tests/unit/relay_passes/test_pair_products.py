"""Two products as one kernel of a template: which pairs are joined, what they compute, and who computes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.cutlass_on_cpu import HostLibrary, put_on_cpu
from tests.support.inline_composites import InlineComposites
from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.graphs import op, partition
from tests.unit.compilers import needs_cc
from tvm_ext import relay
from tvm_ext._tvm import assert_structural_equal
from tvm_ext.byoc_cutlass.host import HostFunction
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.partition import PARTITION, CutlassPartition, CutlassRegion
from tvm_ext.records.persistent import PERSISTENT, PersistentRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.composites import composite_of, inlined, is_composite, region_of, twin_of
from tvm_ext.relay_passes.pair_products import PairProducts
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.toolchains.cutlass_codegen import CutlassBackend
from tvm_ext.toolchains.cutlass_toolchain import link_objects

Array = np.ndarray[Any, Any]
A100 = lookup("nvidia-a100")


class Predictor:
    """Templates apart take 10 us each, one for both what it is told, if there is one."""

    def __init__(self, both_us: float | None) -> None:
        self.both_us, self.asked = both_us, 0

    def predict(self, region: CutlassRegion) -> float:
        if region.then is None:
            return 10.0
        self.asked += 1
        if self.both_us is None:
            raise IllegalRewrite("no tile has the columns of both", "")
        return self.both_us


def halves(*shapes: tuple[int, ...]) -> list[Any]:
    return inputs_of(*shapes, dtype="float16")


def weights(w: Any) -> Any:
    """As linear layers of networks have them."""
    return op.permute_dims(w)


def two_layers() -> tvm.IRModule:
    x, w, b, v, c = halves((48, 24), (32, 24), (32,), (16, 32), (16,))
    inner = op.nn.gelu(op.add(op.matmul(x, weights(w)), b))
    return module_of([x, w, b, v, c], op.nn.relu(op.add(op.matmul(inner, weights(v)), c)))


def plain_layers() -> tvm.IRModule:
    """Second factors as they are, no epilogue between, a residual behind."""
    x, w, v, r = halves((37, 40), (40, 64), (64, 64), (37, 64))
    return module_of([x, w, v, r], op.add(op.matmul(op.matmul(x, w), v), r))


def scaled_layers() -> tvm.IRModule:
    x, w, s, b, v = halves((32, 16), (32, 16), (32,), (32,), (24, 32))
    inner = op.tanh(op.add(op.multiply(op.matmul(x, weights(w)), s), b))
    return module_of([x, w, s, b, v], op.matmul(inner, weights(v)))


def convolved(channels: int, filters: int, second: tuple[int, ...], **options: Any) -> tvm.IRModule:
    x, w, b, v, c = halves((2, 9, 8, channels), (filters, 3, 3, channels), (filters,), second, (second[0],))
    layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
    inner = op.nn.relu(op.add(op.nn.conv2d(x, w, padding=1, **layouts, **options), b))
    return module_of([x, w, b, v, c], op.nn.relu(op.add(op.nn.conv2d(inner, v, **layouts), c)))


GRAPHS: dict[str, Callable[[], tvm.IRModule]] = {
    "two layers": two_layers,
    "second factors row by row, a residual": plain_layers,
    "a scale and a bias": scaled_layers,
    "convolution": lambda: convolved(8, 32, (24, 1, 1, 32)),
    "convolution, fewer filters than the tile, strided": lambda: convolved(16, 48, (48, 1, 1, 48), strides=2),
}


def paired(
    mod: tvm.IRModule,
    backend: Any,
    own: Callable[[Any], float | None] = lambda _: None,
    mode: Any = True,
    device: DeviceSpec = A100,
) -> tuple[tvm.IRModule, CutlassPartition, PersistentRecord | None]:
    cut, _ = partition(mod, device.name)
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        done = PairProducts(device, backend, own, mode)(cut)
    relax.analysis.well_formed(done)
    text = done.attrs.get(PERSISTENT)
    record = None if text is None else from_json(PersistentRecord, str(text))
    return done, from_json(CutlassPartition, str(done.attrs[PARTITION])), record


def functions_of(mod: tvm.IRModule) -> dict[str, Any]:
    return {gv.name_hint: func for gv, func in mod.functions_items() if is_composite(func)}


# --- what is computed ------------------------------------------------------------------------------------------------
@needs_cc
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("residence", ["registers", "shared memory"])
def test_a_pair_computes_what_its_operators_do(residence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches, host functions and objects of the templates, with kernels on the CPU, against the operators."""
    put_on_cpu(monkeypatch, tmp_path)
    backend = CutlassBackend(A100, KernelCache(None))
    pairs = {}
    for name, graph in GRAPHS.items():
        done, _, _ = paired(graph(), backend)
        (pairs[f"f{len(pairs)}"],) = functions_of(done).values()
        assert len(region_of(pairs[f"f{len(pairs) - 1}"]).pattern.split("_then_")) == 2, name
    regions = {name: region_of(func) for name, func in pairs.items()}
    known = {name: backend._candidates(region.kind) for name, region in regions.items()}
    place = "_registers_" if residence == "registers" else "_shared_"
    wanted = {name: [item for item in found if place in item.name] for name, found in known.items()}
    found = {name: items for name, items in wanted.items() if items}
    assert len(found) >= (len(pairs) if residence == "registers" else 4)  # 48 filters fill no tile of shared memory
    compiled, failed = backend.compiler.compile_regions(found)
    assert not failed
    host = [
        HostFunction(name=name, tensor_count=len(pairs[name].params) + 1, call=item.candidate.call)
        for name, item in compiled.items()
    ]
    library = HostLibrary.load(link_objects(host, [item.kernel.image for item in compiled.values()], "sm_80"), tmp_path)
    for name in compiled:
        arrays = [
            np.random.default_rng(3).standard_normal(shape).astype("float16") / 4 for shape in _shapes(pairs[name])
        ]
        expected = _run(twin_of(pairs[name]), arrays)
        result = np.full(expected.shape, np.nan, expected.dtype)
        assert library.call(name, [*arrays, result]) == 0, library.message
        error = np.linalg.norm((result - expected).astype("float64")) / np.linalg.norm(expected.astype("float64"))
        assert error < 2e-3, name


def _shapes(func: Any) -> list[tuple[int, ...]]:
    return [tuple(map(int, param.ty.shape)) for param in composite_of(func).params]


def _run(mod: tvm.IRModule, arrays: list[Array]) -> Array:
    module = relay.GraphModule(relay.build(mod, "llvm"))
    for index, array in enumerate(arrays):
        module.set_input(index, array)
    module.run()
    return np.asarray(module.get_output(0).numpy())


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_the_way_back_gives_the_operators(graph: Callable[[], tvm.IRModule]) -> None:
    """As from two regions, whose parts keep their order."""
    apart = InlineComposites()(partition(graph())[0])["main"]
    assert_structural_equal(inlined(paired(graph(), Predictor(5.0))[0])["main"], apart)


# --- which pairs -----------------------------------------------------------------------------------------------------
def test_the_record_says_what_was_joined() -> None:
    done, cut, record = paired(two_layers(), Predictor(5.0), mode="auto")
    (region,) = cut.taken
    assert region.pattern == "matmul_bias_gelu_then_matmul_bias_relu"
    assert region.value == region.then.value
    ((name, func),) = functions_of(done).items()
    assert region_of(func) == region
    (item,) = record.fused
    assert (item.kernel, item.fused_us, item.separate_us) == (name, 5.0, 20.0)
    assert len(done["main"].body.blocks[0].bindings) == 1


@pytest.mark.parametrize("convolutions", [False, True])
def test_a_whole_block_is_one_kernel_of_sm_90a(convolutions: bool) -> None:
    """Weights as MatMul stores them, or 1x1 convolutions in NHWC. Behind them a scale, and the block's own input."""
    h100, n, c = lookup("nvidia-h100"), 64 * 28 * 28, 96
    if convolutions:
        x, w, b, v, s = halves((64, 28, 28, c), (4 * c, 1, 1, c), (4 * c,), (c, 1, 1, 4 * c), (c,))
        multiply = partial(op.nn.conv2d, data_layout="NHWC", kernel_layout="OHWI")
    else:
        x, w, b, v, s = halves((n, c), (c, 4 * c), (4 * c,), (4 * c, c), (c,))
        multiply = op.matmul
    inner = op.nn.relu(op.add(multiply(x, w), b))
    mod = module_of([x, w, b, v, s], op.add(op.multiply(multiply(inner, v), s), x))
    backend = CutlassBackend(h100, KernelCache(None))
    _, cut, record = paired(mod, backend, mode="auto", device=h100)
    (region,), (item,) = cut.taken, record.fused
    assert region.then.pattern.endswith("_add") and item.fused_us < item.separate_us
    assert {candidate.name for candidate in backend._candidates(region.kind)} == {
        "pair_streamed_float16_sm90_128x128x128", "pair_streamed_float16_sm90_128x64x256",
    }  # fmt: skip


def test_what_gains_nothing_stays_apart() -> None:
    for both_us, mode, joined in ((19.5, "auto", False), (18.5, "auto", True), (25.0, True, True), (None, True, False)):
        _, cut, record = paired(two_layers(), Predictor(both_us), mode=mode)
        assert len(cut.taken) == (1 if joined else 2)
        assert bool(record.fused) == joined
    assert "no template has both: no tile has the columns of both" in record.regions[0].reason


@pytest.mark.parametrize(
    ("both_us", "own_us", "taken"), [(10.0, 9.8, 1), (10.0, 9.0, 0), (None, 9.0, 0), (None, 19.5, 2), (10.0, None, 1)]
)
def test_a_kernel_of_our_own_takes_what_it_is_faster_at(
    both_us: float | None, own_us: float | None, taken: int
) -> None:
    """The operators are in the graph again then, for the pass that makes it."""
    done, cut, _ = paired(two_layers(), Predictor(both_us), lambda _: own_us, mode="auto")
    assert len(cut.taken) == len(functions_of(done)) == taken
    if not taken:
        assert_structural_equal(done["main"], InlineComposites()(partition(two_layers())[0])["main"])
        assert "one kernel of our own 9.0 us" in cut.refused[-1].reason


def used_twice() -> tvm.IRModule:
    x, w, v = halves((48, 24), (32, 24), (32, 32))
    inner = op.nn.relu(op.matmul(x, weights(w)))
    return module_of([x, w, v], op.add(op.matmul(inner, weights(v)), inner))


def read_by_two() -> tvm.IRModule:
    x, w, v = halves((48, 24), (32, 24), (32, 32))
    inner = op.nn.relu(op.matmul(x, weights(w)))
    return module_of([x, w, v], op.concat([op.matmul(inner, weights(v)), op.exp(op.nn.softmax(inner))]))


def second_factor() -> tvm.IRModule:
    x, w, v = halves((48, 24), (24, 32), (16, 48))
    return module_of([x, w, v], op.matmul(v, op.nn.relu(op.matmul(x, w))))


@pytest.mark.parametrize("graph", [used_twice, read_by_two, second_factor])
def test_what_is_read_elsewhere_or_as_another_factor_is_no_link(graph: Callable[[], tvm.IRModule]) -> None:
    predictor = Predictor(1.0)
    _, cut, record = paired(graph(), predictor)
    assert (len(cut.taken), predictor.asked, record) == (2, 0, None)


def test_a_pair_that_is_none_leaves_its_second_product_to_the_next_one() -> None:
    """As in ResNet's blocks: 1 x 1, 3 x 3, 1 x 1, of which the last two are one kernel."""
    x, a, b, c = halves((2, 9, 8, 32), (32, 1, 1, 32), (32, 3, 3, 32), (64, 1, 1, 32))
    layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
    value = op.nn.relu(op.nn.conv2d(x, a, **layouts))
    value = op.nn.relu(op.nn.conv2d(value, b, padding=1, **layouts))
    mod = module_of([x, a, b, c], op.nn.relu(op.nn.conv2d(value, c, **layouts)))
    asked: list[Any] = []
    _, cut, record = paired(mod, CutlassBackend(A100, KernelCache(None)), asked.append)
    assert [item.then is not None for item in cut.taken] == [False, True]
    assert [item.fused for item in record.regions] == [False, True]
    assert "is not 1 x 1" in record.regions[0].reason
    assert len(asked) <= 1  # the first two are no chain of ours either, which is known without a kernel


def layers(count: int) -> tvm.IRModule:
    x, *factors = halves((48, 32), *[(32, 32)] * count)
    value = x
    for factor in factors:
        value = op.nn.relu(op.matmul(value, weights(factor)))
    return module_of([x, *factors], value)


def test_of_three_products_the_first_two_are_a_pair_and_kinds_are_asked_once() -> None:
    predictor = Predictor(1.0)
    _, cut, record = paired(layers(5), predictor)
    assert [item.then is not None for item in cut.taken] == [True, True, False]
    assert (predictor.asked, len(record.regions)) == (1, 2)


@pytest.mark.parametrize(
    ("count", "both_us", "own_us", "ours", "taken"),
    [
        (4, 10.0, {4: 9.0, 2: 9.0}, (4,), 0),  # one kernel of ours is faster than two templates for pairs
        (4, 10.0, {4: 19.5, 3: 30.0, 2: 9.8}, (), 2),  # what gains less than 5 % against the pairs is left to them
        (4, 10.0, {}, (), 2),  # and so is what becomes no kernel, which is known as soon as one is constructed
        (3, 15.0, {2: 9.0}, (2,), 1),
        (8, 18.0, {6: 12.0, 2: 17.5}, (6,), 1),  # six at most; the model's other two are a pair's template
    ],
)
def test_longer_runs_are_cut_where_the_least_time_is_predicted(
    count: int, both_us: float, own_us: dict[int, float], ours: tuple[int, ...], taken: int
) -> None:
    def own(mod: tvm.IRModule) -> float | None:
        return own_us.get(sum(b.value.op.name == "relax.matmul" for b in mod["main"].body.blocks[0].bindings))

    done, cut, _ = paired(layers(count), Predictor(both_us), own, mode="auto")
    assert len(cut.taken) == len(functions_of(done)) == taken
    assert len(cut.refused) == sum(ours)
    assert all(f"one kernel of our own {own_us[ours[0]]:.1f} us" in item.reason for item in cut.refused)
    if len(ours) == 1 and ours[0] == count == 4:
        assert "2 templates, pairs among them, 20.0 us" in cut.refused[0].reason


class FirstWithout(Predictor):
    def predict(self, region: CutlassRegion) -> float:
        if region.then is None and region.problem.depth == 24:
            raise IllegalRewrite("no template", "")
        return super().predict(region)


def test_a_product_without_a_template_leaves_those_behind_it_to_be_joined() -> None:
    x, a, b, c = halves((48, 24), (32, 24), (32, 32), (32, 32))
    inner = op.matmul(op.nn.relu(op.matmul(x, weights(a))), weights(b))
    mod = module_of([x, a, b, c], op.matmul(op.nn.relu(inner), weights(c)))
    _, cut, record = paired(mod, FirstWithout(5.0), mode="auto")
    assert [item.then is not None for item in cut.taken] == [False, True]
    assert [(item.fused, item.reason[:11]) for item in record.regions] == [
        (False, "no template"),
        (True, "the model: "),
    ]
