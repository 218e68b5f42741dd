"""FusePersistent: which products become one kernel, why others do not, and that the kernels are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, topi

from tests.support.small_modules import inputs_of, module_of
from tests.unit.chain_modules import (
    TOLERANCE,
    ChainModule,
    Conv,
    check,
    conv_chain,
    gemm_chain,
    random_conv_chain,
    random_gemm_chain,
)
from tests.unit.kernels import constructed, relative_error, run
from tvm_ext import relay
from tvm_ext._tvm import PrimFunc, assert_structural_equal, relax
from tvm_ext.cost.persistent import LEAST_GAIN
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import operator_pipeline, plan_build
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.persistent import CHAIN, PERSISTENT, ChainVerdict, PanelPlan, PersistentRecord, PersistentRegion
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.relay_passes.fuse_persistent import FusePersistent
from tvm_ext.support.limits import limited
from tvm_ext.tir_passes.construct_kernels import construct_kernel

CPU = "cpu-cascade-lake"


def operators(mod: Any, mode: bool | str = True, device: str | None = CPU, threads: int = 2, **options: Any) -> Any:
    """``mod`` as one PrimFunc for each operator, chains fused by ``mode``, for a CPU that was written down."""
    plan = plan_build(
        "llvm", BuildOptions(device=device, enable_persistent_fusion=mode, num_threads=threads, **options)
    )
    with plan.target:
        return operator_pipeline(plan.target, plan.device, plan.options)(mod)


def record_of(operators_: Any) -> PersistentRecord:
    text = operators_.attrs.get(PERSISTENT) if operators_.attrs else None
    return PersistentRecord(regions=()) if text is None else from_json(PersistentRecord, str(text))


def regions(mod: Any, mode: bool | str = True, **options: Any) -> tuple[PersistentRegion, ...]:
    return record_of(operators(mod, mode, **options)).regions


def chain_functions(operators_: Any) -> list[Any]:
    functions = [func for _, func in operators_.functions_items() if isinstance(func, PrimFunc)]
    return [func for func in functions if func.attrs and CHAIN in func.attrs]


def judge(func: Any) -> Callable[..., ChainVerdict]:
    """A judge that says what ``func`` says of the number of products in a chain: (apart, fused) in us, or why not."""

    def verdict(chain: Any, _constants: Any) -> ChainVerdict:
        said = func(sum("matmul" in name for name in _blocks(chain)))
        if isinstance(said, str):
            raise IllegalRewrite(said)
        plan = PanelPlan(axes=(0,), sizes=(8,))
        return ChainVerdict(plan=plan, separate_us=said[0], fused_us=said[1], saved_bytes=1.0, pays=said[0] > said[1])

    return verdict


def _blocks(func: Any) -> list[str]:
    body = func.body.block.body
    names = []
    for statement in body.seq:
        while hasattr(statement, "body"):
            statement = statement.body
        names.append(str(statement.block.name_hint))
    return names


# --- kernels --------------------------------------------------------------------------------------------------------
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "chain",
    [
        gemm_chain(97, (33, 64, 16)),
        gemm_chain((3, 31), (8, 48, 5, 17), ("bias relu", "silu", "bias tanh")),
        gemm_chain(211, (16, 1, 4), ("relu", "none")),
        gemm_chain(64, (5, 8, 8, 8, 8), residual=True),
        gemm_chain(1, (7, 9, 11)),
    ],
    ids=["two", "three of a batch", "one column", "four and a residual", "one row"],
)
def test_chains_of_products_are_right(chain: ChainModule) -> None:
    check(chain, fused=len(chain.mod["main"].script().split("matmul(")) - 1)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("layout", ["auto", "NCHW"])
@pytest.mark.parametrize(
    "convs",
    [
        (Conv(filters=48, kernel=3, padding=1), Conv(filters=48)),
        (Conv(filters=32, kernel=3, padding=1, stride=2), Conv(filters=16, epilogue="silu"), Conv(filters=24)),
        (Conv(filters=16, kernel=3, dilation=2, groups=4), Conv(filters=32, epilogue="none")),
    ],
    ids=["padded", "strided", "dilated in groups"],
)
def test_chains_of_convolutions_are_right(convs: tuple[Conv, ...], layout: str) -> None:
    check(conv_chain((2, 16, 19, 23), *convs, residual=len(convs) == 3), fused=len(convs), layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_chains_of_products_are_right(seed: int) -> None:
    check(random_gemm_chain(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_chains_of_convolutions_are_right(seed: int) -> None:
    check(random_conv_chain(seed), layout=("auto", "NCHWc", "NCHW")[seed % 3])


def test_a_fused_chain_is_the_same_numbers() -> None:
    chain = gemm_chain(100, (24, 40, 12))
    results = []
    for mode in (True, False):
        library = relay.build(chain.mod, enable_persistent_fusion=mode)
        results.append(library.vm(tvm.cpu())["main"](*chain.arguments()).numpy())
    np.testing.assert_array_equal(*results)


def test_what_cannot_be_emitted_in_panels_runs_operator_by_operator() -> None:
    """A verdict that does not fit its chain (here: panels along the columns) costs speed, not the result."""
    chain = gemm_chain(100, (24, 40, 12))
    (func,) = chain_functions(operators(chain.mod, device=None))
    wrong = ChainVerdict(
        plan=PanelPlan(axes=(1,), sizes=(4,)), fused_us=1.0, separate_us=2.0, saved_bytes=0.0, pays=True
    )
    kernel = construct_kernel(func.with_attr(CHAIN, to_json(wrong)), "chain", lookup(CPU), BuildOptions())
    choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
    assert choice.path == "rtile"
    assert choice.notes[0].startswith("no kernel of a chain panel by panel: every panel would repeat all of")


def test_what_every_panel_reads_whole_is_computed_before_the_panels() -> None:
    """exp(b) is read by both products: once for all panels, not once for each."""
    x, w, b = (te.placeholder(shape, "float32", name) for shape, name in (((70, 8), "x"), ((8, 8), "w"), ((8,), "b")))
    shift = te.compute((8,), lambda j: te.exp(b[j]), "shift")
    first = te.compute((70, 8), lambda i, j: topi.nn.matmul(x, w)[i, j] + shift[j], "first")
    second = topi.nn.matmul(first, w)
    func = te.create_prim_func([x, w, b, te.compute((70, 8), lambda i, j: second[i, j] + shift[j], "second")])
    verdict = ChainVerdict(
        plan=PanelPlan(axes=(0,), sizes=(32,)), fused_us=1.0, separate_us=2.0, saved_bytes=0.0, pays=True
    )
    kernel, choice = constructed(func.with_attr(CHAIN, to_json(verdict)))
    assert choice.notes[0] == "a chain in 3 panels of 32"
    values = [np.random.default_rng(0).standard_normal(shape).astype("float32") for shape in ((70, 8), (8, 8), (8,))]
    wide = [value.astype("float64") for value in values]
    expected = (wide[0] @ wide[1] + np.exp(wide[2])) @ wide[1] + np.exp(wide[2])
    assert relative_error(run(kernel, choice, values, (70, 8), "float32"), expected) < TOLERANCE


def test_a_report_tells_what_was_fused_and_what_a_kernel_should_take() -> None:
    report = check(gemm_chain(2048, (64, 64, 16)), fused=2)
    (region,) = report.persistent.fused
    operator = report.operator(region.kernel)
    assert operator.predicted_s == pytest.approx(region.fused_us * 1e-6)
    assert "1 of 1 chains in one kernel each" in str(report)
    assert f"persistent kernel: {region.operators[0]}" in str(report)


def test_switched_off_nothing_is_considered() -> None:
    chain = gemm_chain(64, (8, 8, 8))
    assert regions(chain.mod, mode=False) == ()
    assert relay.build(chain.mod, enable_persistent_fusion=False).report.persistent is None
    assert regions(chain.mod, enable_roller=False) == ()


def test_the_same_chains_for_a_recorded_cpu_every_time() -> None:
    chain = conv_chain((2, 48, 28, 28), Conv(filters=48, kernel=3, padding=1), Conv(filters=48))
    first, second = operators(chain.mod), operators(chain.mod)
    assert_structural_equal(first, second)
    assert record_of(first) == record_of(second)
    assert len(chain_functions(first)) == 1


# --- which chains ---------------------------------------------------------------------------------------------------
def test_the_model_says_where_it_pays() -> None:
    """Rows that come from and go to memory between small weights pay; weights beyond L2 do not."""
    (region,) = regions(gemm_chain(128320, (96, 32, 96)).mod, mode="auto")
    assert region.fused and region.separate_us >= LEAST_GAIN * region.fused_us
    assert region.saved_bytes == 2 * 128320 * 32 * 4
    (region,) = regions(gemm_chain(128, (768, 3072, 768)).mod, mode="auto")
    assert not region.fused and region.reason == "no gain is predicted"
    assert region.separate_us < LEAST_GAIN * region.fused_us


def test_what_stays_in_the_cache_of_the_only_core_gains_nothing() -> None:
    """Two cores save a parallel region and exchange a tensor; one core has both products' values in its L1 anyway."""
    chain = gemm_chain(2464, (4, 1, 4))
    (region,) = regions(chain.mod, mode="auto")
    assert region.fused
    (region,) = record_of(operators(chain.mod, mode="auto", threads=1)).regions
    assert not region.fused and region.reason == "no gain is predicted"


def matmul(a: Any, *shape: int) -> Any:
    return relax.op.matmul(a, relax.const(np.full(shape, 0.5, "float32")))


def test_a_value_that_is_read_elsewhere_stays() -> None:
    (x,) = inputs_of((32, 8))
    first = matmul(x, 8, 8)
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(relax.op.nn.relu(builder.emit(first)))
            second = builder.emit_output(matmul(value, 8, 4))
            also = builder.emit_output(value)
        builder.emit_func_output(relax.Tuple([second, also]))
    (region,) = regions(builder.get())
    assert not region.fused and region.reason == "the value between them is read elsewhere as well"


def test_two_readers_or_two_reads_are_elsewhere_as_well() -> None:
    (x,) = inputs_of((8, 8))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(matmul(x, 8, 8))
            square = builder.emit(relax.op.matmul(value, value))
            result = builder.emit_output(relax.op.add(square, builder.emit(matmul(value, 8, 8))))
        builder.emit_func_output(result)
    found = regions(builder.get())
    assert found and not any(region.fused for region in found)


def test_a_second_window_would_repeat_points() -> None:
    convs = (Conv(filters=16, kernel=3, padding=1), Conv(filters=16, kernel=3, padding=1))
    (region,) = regions(conv_chain((1, 16, 200, 200), *convs).mod)
    assert not region.fused
    assert "neighbouring panels would repeat points of" in region.reason


def test_whole_images_need_no_point_twice() -> None:
    convs = (Conv(filters=8, kernel=3, padding=1), Conv(filters=8, kernel=3, padding=1))
    report = check(conv_chain((3, 8, 9, 9), *convs), fused=2)
    assert "3 panels of 1" in report.operator(report.persistent.fused[0].kernel).choice.reason


def test_rows_that_do_not_stay_in_the_cache_are_refused() -> None:
    (region,) = regions(gemm_chain(16, (8, 200_000, 8)).mod)
    assert not region.fused and "may stay in L2" in region.reason


@pytest.mark.parametrize("layout", ["NCHW", "NCHWc"])
def test_depthwise_windows_keep_their_kernels(layout: str) -> None:
    chain = conv_chain((1, 32, 20, 20), Conv(filters=32, kernel=3, padding=1, groups=32), Conv(filters=32))
    (region,) = regions(chain.mod, layout=layout)
    assert not region.fused and "has kernels of its own" in region.reason


def test_a_convolution_apart_has_its_fastest_form() -> None:
    """A chain has direct sums; the 3x3 alone goes in Winograd's form, unless the option forbids it."""
    chain = conv_chain((1, 16, 56, 56), Conv(filters=64), Conv(filters=64, kernel=3, padding=1), Conv(filters=64))
    for option, fused in (("auto", False), ("off", True)):
        found = regions(chain.mod, mode="auto", layout="NCHWc", winograd=option)
        assert [region.fused for region in found if region.separate_us is not None] == [fused]


def test_dynamic_shapes_and_what_is_no_product_are_left_alone() -> None:
    rows = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((rows, 8), "float32"))
    assert regions(module_of([x], relax.op.nn.relu(matmul(matmul(x, 8, 8), 8, 8)))) == ()
    (x,) = inputs_of((8, 8))
    assert regions(module_of([x], relax.op.sum(relax.op.nn.softmax(x), axis=1))) == ()


def test_reshapes_between_products_end_a_chain() -> None:
    (x,) = inputs_of((8, 8))
    assert regions(module_of([x], matmul(relax.op.reshape(matmul(x, 8, 8), (4, 16)), 16, 4))) == ()


@pytest.mark.parametrize("target", ["nvidia-a100", "nvidia-v100", "opencl"])
def test_chains_are_fused_for_gpus(target: str) -> None:
    plan = plan_build(
        target, BuildOptions(enable_persistent_fusion=True, device="nvidia-a100" if target == "opencl" else None)
    )
    with plan.target:
        made = plan.construct(gemm_chain(64, (8, 8, 8)).mod)
    (region,) = record_of(made).regions
    assert region.fused and "panels" not in region.reason
    (kernel,) = [func for _, func in made.functions_items() if isinstance(func, PrimFunc)]
    choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
    assert [item.launches for item in choice.gpu] == [1]


def test_what_does_not_stay_in_a_threadblock_says_so() -> None:
    plan = plan_build("nvidia-a100", BuildOptions(enable_persistent_fusion=True))
    with plan.target:
        fused = operator_pipeline(plan.target, plan.device, plan.options)(gemm_chain(64, (8, 4096, 8)).mod)
    (region,) = record_of(fused).regions
    assert not region.fused and "do not stay in a threadblock" in region.reason


# --- segments -------------------------------------------------------------------------------------------------------
def unfused(sizes: tuple[int, ...]) -> Any:
    return operators(gemm_chain(64, sizes).mod, mode=False)


def test_a_chain_is_cut_where_most_is_saved(immutable_modules: None) -> None:
    mod = unfused((8, 8, 8, 8, 8))
    fused = FusePersistent(judge(lambda count: {2: (10, 4), 3: (15, 14)}.get(count, "too many")), "auto")(mod)
    record = record_of(fused)
    assert [len(region.operators) for region in record.fused] == [2, 2]
    (apart,) = [region for region in record.regions if not region.fused]
    assert apart.reason == "the chain is cut here: its other segments save more"


def test_asked_for_as_many_products_as_is_legal_are_joined(immutable_modules: None) -> None:
    mod = unfused((8, 8, 8, 8))
    slower = judge(lambda count: (10, 20))
    (region,) = record_of(FusePersistent(slower, True)(mod)).regions
    assert region.fused and len(region.operators) == 3
    assert region.reason.startswith("as asked for, although no gain is predicted")
    assert not any(region.fused for region in record_of(FusePersistent(slower, "auto")(mod)).regions)


def test_the_length_of_a_chain_has_a_limit(immutable_modules: None) -> None:
    mod = unfused((8, 8, 8, 8, 8))
    with limited(chained_products=2):
        record = record_of(FusePersistent(judge(lambda count: (10, 4)), True)(mod))
    assert [len(region.operators) for region in record.fused] == [2, 2]


def test_a_module_without_chains_stays_as_it_is(immutable_modules: None) -> None:
    mod = unfused((8, 8))
    assert_structural_equal(FusePersistent(judge(lambda count: (10, 4)), True)(mod), mod)


def test_records_round_trip() -> None:
    record = record_of(operators(gemm_chain(64, (8, 8, 8)).mod))
    assert record.fused
    assert from_json(PersistentRecord, to_json(record)) == record
    (func,) = chain_functions(operators(gemm_chain(64, (8, 8, 8)).mod))
    verdict = from_json(ChainVerdict, str(func.attrs[CHAIN]))
    assert verdict.plan.axes == (0,)
