"""Kernels of attention against NumPy in float64, and what they make of infinities and NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm

from tests.support.attentions import LOWEST, arrays_of, drawn, expected, function_of, packed
from tests.support.dot_rows import row_of, use_models_of_missing_instructions
from tests.support.guarded_memory import call_guarded
from tests.unit.kernels import constructed, cpu, relative_error, run
from tvm_ext._tvm import CPU_PIPELINE, Call, structural_walk
from tvm_ext.cost.attention_time import AttentionClock
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.attention import Attention, MatrixOperand, ScoreTerm
from tvm_ext.tir_passes.emit.cpu_attention import emit
from tvm_ext.tir_passes.emit.cpu_attention.blocks import AttentionFunctions
from tvm_ext.tir_passes.expressions.on_cpu import on_cpu

ALLOWED = {"float32": 4e-6, "float16": 1e-3}
NARROW = 2.0**-6
"""By norm, of products in bfloat16: each operand is off by up to 2**-9, and a score's error is one of its power."""


def attention(batch: int, queries: int, keys: int, features: int, **changes: Any) -> Attention:
    settings: dict[str, Any] = {
        "batch": batch,
        "queries": queries,
        "keys": keys,
        "features": features,
        "value_features": features,
        "scale": features**-0.5,
        "query": packed((1, batch), queries, features, order="brhc"),
        "key": packed((1, batch), keys, features, order="brhc"),
        "value": packed((1, batch), keys, features, order="brhc"),
        "output": packed((1, batch), queries, features, order="brhc"),
    }
    return Attention(**(settings | changes))


def kernel_output(work: Attention, arrays: list[Any], device: DeviceSpec | None = None) -> Any:
    """The output, in guarded memory; `run` of `tests.unit.kernels` compiles twice, which is once too often here."""
    return compiled(work, device)(arrays)


def compiled(work: Attention, device: DeviceSpec | None = None) -> Callable[[list[Any]], Any]:
    kernel, choice = constructed(function_of(work), device=device)
    assert choice.path == "rtile" and choice.program is not None, choice.reason
    target = device_db.device_for_target("llvm")[1]
    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    library = tvm.tirx.build(module, target=target, pipeline=CPU_PIPELINE)

    def call(arrays: list[Any]) -> Any:
        output = tvm.runtime.tensor(np.full(work.output.size, np.nan, work.output.dtype))
        call_guarded("main", library["main"], [*map(tvm.runtime.tensor, arrays), output], [len(arrays)])
        return output.numpy()

    return call


def check(seed: int, device: DeviceSpec | None = None) -> None:
    rng = np.random.default_rng(seed)
    work = drawn(rng)
    arrays = arrays_of(work, rng)
    assert relative_error(kernel_output(work, arrays, device), expected(work, arrays)) < ALLOWED[work.output.dtype]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("seed", range(4))
def test_random_attentions_are_what_numpy_says(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 80))
def test_more_random_attentions_are_what_numpy_says(seed: int) -> None:
    check(seed, device_db.lookup("cpu-cascade-lake-avx2") if seed % 2 else None)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("row", ["cpu-epyc-zen5", "cpu-cascade-lake-avx2"])
def test_random_attentions_in_bfloat16(row: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_models_of_missing_instructions(monkeypatch)
    rng = np.random.default_rng([seed, len(row)])
    work = replace(drawn(rng), products="bfloat16")
    arrays = arrays_of(work, rng)
    found = kernel_output(work, arrays, row_of(row))
    assert relative_error(found, expected(work, arrays)) < NARROW


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("queries", "keys", "features", "copies"),
    [(19, 33, 7, "block"), (70, 130, 16, "shared"), (33, 301, 24, "block"), (16, 55, 17, "shared")],
)
def test_bfloat16_that_rounds_nothing_is_exact(
    queries: int, keys: int, features: int, copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small whole numbers, and scores so far apart that the largest ones' powers are 1, all others 0."""
    use_models_of_missing_instructions(monkeypatch)
    work, device = attention(3, queries, keys, features, scale=128.0, products="bfloat16"), row_of("cpu-epyc-zen5")
    tiles = AttentionClock(work, device).usual_tiles()
    assert tiles is not None
    monkeypatch.setattr(AttentionClock, "usual_tiles", lambda _: replace(tiles, copies=copies))
    rng = np.random.default_rng(keys)
    arrays = [rng.integers(-2, 3, operand.size).astype("float32") for operand in work.operands[:3]]
    found, right = kernel_output(work, arrays, device), expected(work, arrays)
    assert np.abs(found - right).max() < 1e-6


def test_bfloat16_where_no_instruction_serves_it_has_no_tiles() -> None:
    work = attention(1, 16, 16, 16, products="bfloat16")
    assert AttentionClock(work, device_db.lookup("cpu-sse2")).candidates() == []


def test_registers_of_eight_lanes() -> None:
    work = attention(1, 19, 12, 16)
    arrays = arrays_of(work, np.random.default_rng(6))
    found = kernel_output(work, arrays, device_db.lookup("cpu-cascade-lake-avx2"))
    assert relative_error(found, expected(work, arrays)) < ALLOWED["float32"]


def test_workspaces_are_written_within_their_bounds() -> None:
    work = attention(2, 20, 21, 17)
    arrays = arrays_of(work, np.random.default_rng(7))
    kernel, choice = constructed(function_of(work))
    found = run(kernel, choice, arrays, (work.output.size,), "float32")
    assert relative_error(found, expected(work, arrays)) < ALLOWED["float32"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("queries", "keys", "features"), [(70, 130, 16), (1, 90, 32), (5, 1, 16)])
def test_blocks_of_queries_and_keys_and_their_remainders(queries: int, keys: int, features: int) -> None:
    work = attention(2, queries, keys, features)
    arrays = arrays_of(work, np.random.default_rng(0))
    assert relative_error(kernel_output(work, arrays), expected(work, arrays)) < ALLOWED["float32"]


@pytest.mark.parametrize("width", [19, 32])
def test_terms_whose_queries_lie_together(width: int) -> None:
    """Whole registers of them are read where the tensor holds what is behind the last query."""
    operand = MatrixOperand(
        dtype="float32", size=40 * width, offset=0, batch=((2, 20 * width),), row_stride=1, column_stride=width
    )
    term = ScoreTerm(change="add", operand=operand, scale=2.0)
    work = attention(2, 19, 20, 8, terms=(term,))
    assert work.staged(16) == (width == 19,)
    arrays = arrays_of(work, np.random.default_rng(8))
    assert relative_error(kernel_output(work, arrays), expected(work, arrays)) < ALLOWED["float32"]


def test_scores_far_beyond_what_exp_can_take() -> None:
    """Without the maximum taken off, exp(5000) would be inf; the maximum grows from block to block here."""
    work = attention(1, 20, 300, 16, scale=1.0)
    arrays = arrays_of(work, np.random.default_rng(1))
    arrays[1] *= np.repeat(np.linspace(1, 400, 300), 16).astype("f4")
    found = kernel_output(work, arrays)
    assert np.isfinite(found).all()
    assert relative_error(found, expected(work, arrays)) < 1e-4


def masked_by(mask: Any, queries: int = 20) -> tuple[Attention, list[Any]]:
    keys = mask.shape[-1]
    operand = MatrixOperand(
        dtype="float32", size=mask.size, offset=0, batch=((1, 0),), row_stride=keys, column_stride=1
    )
    work = attention(1, queries, keys, 16, terms=(ScoreTerm(change="add", operand=operand),))
    return work, [*arrays_of(work, np.random.default_rng(2))[:3], mask.ravel().astype("f4")]


def test_rows_that_are_masked_by_minus_infinity() -> None:
    """All of a row: NaN, as a softmax of it is. The first keys, more than a block of them: only the others count."""
    mask = np.zeros((20, 300))
    mask[3] = -np.inf
    mask[5, :250] = -np.inf
    work, arrays = masked_by(mask)
    found = kernel_output(work, arrays).reshape(20, 16)
    wanted = expected(work, arrays).reshape(20, 16)
    assert np.isnan(found[3]).all()
    others = np.arange(20) != 3
    assert relative_error(found[others], wanted[others]) < ALLOWED["float32"]


def test_rows_that_are_masked_by_finite_numbers_are_means() -> None:
    mask = np.full((20, 300), LOWEST)
    mask[5, 100:] = 0.0
    work, arrays = masked_by(mask)
    found = kernel_output(work, arrays)
    mean = arrays[2].reshape(300, 16).mean(0)
    assert np.allclose(found.reshape(20, 16)[3], mean, atol=1e-5)
    assert relative_error(found, expected(work, arrays)) < ALLOWED["float32"]


def test_nan_and_infinities_reach_the_rows_that_they_would() -> None:
    """Of one kernel: each operand in turn has one such element, in the second block of keys where it has keys."""
    work = attention(1, 20, 150, 16, scale=1.0)
    plain = arrays_of(work, np.random.default_rng(3))
    run_again = compiled(work)
    for operand in range(3):
        for value in (np.nan, np.inf, -np.inf):
            arrays = list(plain)
            arrays[operand] = arrays[operand].copy()
            arrays[operand][16 * (7 if operand == 0 else 140)] = value
            found, wanted = run_again(arrays), expected(work, arrays)
            assert np.array_equal(np.isnan(found), np.isnan(wanted)), (operand, value)
            assert np.array_equal(np.isinf(found), np.isinf(wanted)), (operand, value)
            finite = np.isfinite(wanted)
            assert relative_error(found[finite], wanted[finite]) < ALLOWED["float32"]


def test_heads_of_keys_that_several_heads_of_queries_share() -> None:
    key = MatrixOperand(
        dtype="float32", size=2 * 33 * 16, offset=0, batch=((2, 33 * 16), (3, 0)), row_stride=16, column_stride=1
    )
    work = attention(6, 80, 33, 16, key=key, value=key)
    arrays = arrays_of(work, np.random.default_rng(4))
    assert relative_error(kernel_output(work, arrays), expected(work, arrays)) < ALLOWED["float32"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("copies", "dtype"), [("values", "float32"), ("block", "float16"), ("shared", "float32"), ("shared", "float16")]
)
def test_every_way_to_read_keys_and_values(copies: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        name: packed((1, 3), rows, 24, dtype, "brhc")
        for name, rows in (("query", 32), ("key", 64), ("value", 64), ("output", 32))
    }
    work = attention(3, 32, 64, 24, **changes)
    arrays = arrays_of(work, np.random.default_rng(5))
    tiles = AttentionClock(work, cpu()).usual_tiles()
    assert tiles is not None
    monkeypatch.setattr(AttentionClock, "usual_tiles", lambda _: replace(tiles, copies=copies, key_block=32))
    assert relative_error(kernel_output(work, arrays), expected(work, arrays)) < ALLOWED[dtype]


def test_the_workspace_does_not_hold_the_scores() -> None:
    """What is allocated grows with the keys, never with keys times queries."""

    def allocated(count: int) -> int:
        work = attention(2, count, count, 64)
        tiles = AttentionClock(work, device).usual_tiles()
        assert tiles is not None
        params = function_of(work).params
        sizes: list[int] = []
        body = on_cpu(
            emit.emit_attention(work, tiles, params, 3, AttentionFunctions(exp=emit.tirx.exp, dot=None)), device
        )
        structural_walk(body, (emit.tirx.AllocBuffer, lambda item: sizes.append(int(np.prod(item.buffer.ty.shape)))))
        return sum(sizes)

    device = device_db.lookup("cpu-cascade-lake")
    small, large = allocated(1024), allocated(4096)
    assert large <= 4 * small
    assert large < 4096 * 4096 / 8


def test_the_kernel_calls_no_function_for_exp() -> None:
    kernel, _ = constructed(function_of(attention(1, 32, 32, 32)))
    names: list[str] = []
    structural_walk(kernel.body, (Call, lambda call: names.append(str(getattr(call.op, "name", "")))))
    assert "tirx.exp" not in names
