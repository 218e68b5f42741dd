"""Attention by CUTLASS's examples 41 and 88: which are taken, where their elements lie by a launch, what is refused.

No GPU runs the kernel here; `test_the_kernel_compiles` asks nvcc. What a launch is told is compared with the attention
as a tensor expression: the template's own formula of addresses, element by element.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.inline_composites import InlineComposites
from tests.unit.byoc_cutlass.graphs import decided, number, op, partition
from tests.unit.byoc_cutlass.host_library import BY_THREADS, address, host_library
from tests.unit.compilers import needs_nvcc
from tvm_ext.byoc_cutlass.attention import AttentionConfig, AttentionFamily, attention_region, layout_of
from tvm_ext.byoc_cutlass.emit_attention import HOPPER_TILES, emit_attention
from tvm_ext.byoc_cutlass.profiler import buffers_of
from tvm_ext.byoc_cutlass.selection import candidates_of, family_of
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.attention import Attention, MatrixOperand, ScoreTerm
from tvm_ext.records.partition import CutlassRegion
from tvm_ext.toolchains.cutlass_toolchain import compile_gemm

B, S, H, D = 2, 16, 3, 8
H100 = lookup("nvidia-h100")


def encoder(dtype: str = "float16", *, masked: bool = True, keys: int = S) -> tvm.IRModule:
    """Self-attention of H heads."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((B, keys, H * D), dtype))
    mask = relax.Var("mask", relax.TensorType((B, 1, 1, keys), dtype))
    weights = [relax.const(np.ones((H * D, H * D), dtype), dtype) for _ in range(3)]
    with builder.function("main", [x, mask]):
        with builder.dataflow():
            made = [builder.emit(op.matmul(x, weight)) for weight in weights]
            heads = [builder.emit(op.reshape(one, (B, keys, H, D))) for one in made]
            query, key, value = (builder.emit(op.permute_dims(one, [0, 2, 1, 3])) for one in heads)
            scores = builder.emit(op.matmul(query, builder.emit(op.permute_dims(key, [0, 1, 3, 2]))))
            scores = builder.emit(op.multiply(scores, number(0.25, dtype)))
            scores = builder.emit(op.add(scores, mask)) if masked else scores
            result = builder.emit(op.matmul(builder.emit(op.nn.softmax(scores, -1)), value))
            result = builder.emit(op.permute_dims(result, [0, 2, 1, 3]))
            result = builder.emit_output(builder.emit(op.reshape(result, (B, keys, H * D))))
        builder.emit_func_output(result)
    return builder.get()


def taken(mod: tvm.IRModule, device: str = "nvidia-a100") -> CutlassRegion:
    (region,) = (region for region in decided(mod, device).taken if region.attention is not None)
    return region


def why_not(mod: tvm.IRModule, device: str = "nvidia-a100") -> str:
    found = decided(mod, device)
    assert all(region.attention is None for region in found.taken)
    (reason,) = (other.reason for other in found.others if other.operator == "attention")
    return reason


def test_an_encoders_attention_is_one_region_and_comes_back() -> None:
    cut, record = partition(encoder())
    assert [region.pattern for region in record.taken].count("attention") == 1
    assert len(record.taken) == 4  # its own two products are no regions
    values = [binding.value for binding in InlineComposites()(cut)["main"].body.blocks[0].bindings]
    names = [value.op.name for value in values if isinstance(value, relax.Call)]
    assert names.count("relax.matmul") == 5
    assert "relax.nn.softmax" in names


def by_template(numbers: tuple[int, ...], at: int, batch: int, head: int, row: int) -> int:
    """Example 41, `Params.advance_to_block`: where a row of an operand begins; ``at`` is its first number."""
    offset, row_stride, head_stride, batch_stride = numbers[at : at + 4]
    return offset + batch * batch_stride + row * row_stride + head * head_stride


def place(operand: MatrixOperand, batch: int, row: int) -> int:
    at, left = operand.offset + row * operand.row_stride, 1
    for extent, stride in reversed(operand.batch):
        at += batch // left % extent * stride
        left *= extent
    return at


def test_a_launch_is_told_where_every_row_lies() -> None:
    region = taken(encoder())
    assert [size for _, size in buffers_of(region)] == [*[2 * B * S * H * D] * 3, 2 * B * S, 2 * B * S * H * D]
    work, (best, *_) = region.attention, candidates_of(region, lookup("nvidia-a100"))
    assert work is not None
    numbers = best.call.numbers
    batches, heads, queries, keys, features, value_features, out_row = numbers[16:23]
    assert (queries, keys, features, value_features) == (S, S, D, D)
    assert np.int32(numbers[23]).view("float32") == np.float32(0.25)
    for batch, head, row in product(range(batches), range(heads), range(S)):
        flat = batch * heads + head
        read = (work.query, work.key, work.value, work.terms[0].operand)
        for operand, at in zip(read, (0, 4, 8, 12), strict=True):
            assert by_template(numbers, at, batch, head, row) == place(operand, flat, row)
        # `output_ptr` moves by the batch's queries, by the query, and by the head's features.
        assert (batch * queries + row) * out_row + head * value_features == place(work.output, flat, row)


def plain(**changed: Any) -> Attention:
    """Two batches of three heads, each operand (batch, row, head, feature)."""

    def rows(dtype: str = "float16", columns: int = D) -> MatrixOperand:
        row = H * columns
        batch = ((B, S * row), (H, columns))
        return MatrixOperand(dtype=dtype, size=B * S * row, offset=0, batch=batch, row_stride=row, column_stride=1)

    work = Attention(
        batch=B * H, queries=S, keys=S, features=D, value_features=D, scale=0.5, query=rows(), key=rows(), value=rows(),
        output=rows(),
    )  # fmt: skip
    return replace(work, **changed)


MASK = MatrixOperand(dtype="float16", size=S, offset=0, batch=((B * H, 0),), row_stride=0, column_stride=1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"query": replace(plain().query, dtype="float32")}, "float16, not float16, float32"),
        ({"key": replace(plain().key, row_stride=1, column_stride=S)}, "keys are no rows of contiguous"),
        ({"value": replace(plain().value, offset=3)}, "no multiples of 4"),
        ({"key": replace(plain().key, batch=((6, 0),), offset=2)}, "no multiples of 4"),
        ({"output": replace(plain().output, batch=((6, S * D),), row_stride=D)}, "distances for batches and heads"),
        ({"output": replace(plain().output, row_stride=D + 1)}, "not written query by query"),
        ({"terms": (ScoreTerm(change="add", operand=MASK, scale=2.0),)}, "unscaled"),
        ({"terms": (ScoreTerm(change="choose", operand=replace(MASK, dtype="bool")),)}, "chooses none"),
        ({"terms": (ScoreTerm(change="add", operand=MASK),) * 2}, "one tensor to the scores"),
        ({"cleared": replace(MASK, dtype="bool")}, "no probabilities"),
        ({"terms": (ScoreTerm(change="add", operand=MASK),), "keys": 12}, "12 keys"),
        ({"features": 6}, "6 and 8 features"),
    ],
)
def test_what_the_template_cannot_read_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(IllegalRewrite, match=words):
        layout_of(plain(**changed))


def test_shared_heads_of_keys_are_refused() -> None:
    """Six heads, three of which share one of keys: 0, 0, 0, 8, 8, 8 is no even distance."""
    shared = replace(plain().key, batch=((2, D), (3, 0)))
    with pytest.raises(IllegalRewrite, match="even distances"):
        layout_of(plain(key=shared, output=replace(plain().output, batch=((6, D),), row_stride=6 * D)))


def test_refused_attention_leaves_its_products_to_templates() -> None:
    assert "takes float16, not float32: of float32 it multiplies parts in tfloat32" in why_not(encoder("float32"))
    assert "12 keys" in why_not(encoder(keys=12))
    assert "compute capability 7.5" in why_not(encoder(), "nvidia-v100")
    assert [region.pattern for region in decided(encoder(keys=12)).taken].count("batched_matmul") == 2


def test_templates_follow_features_masks_and_architecture() -> None:
    region, device = taken(encoder()), lookup("nvidia-a100")
    configs: list[AttentionConfig] = list(family_of(region, device).legal())
    assert len(configs) == 5
    assert all(config.biased and config.wide and config.architecture == 80 for config in configs)
    turing = list(family_of(region, lookup("nvidia-t4")).legal())
    assert {(config.architecture, config.queries * config.keys) for config in turing} == {(75, 4096)}
    names = {candidate.call.symbol for candidate in candidates_of(region, device)}
    assert len(names) == 5
    assert all(candidate.time_us > 0 for candidate in candidates_of(region, device))


def hopper(work: Attention) -> AttentionFamily:
    region = attention_region(work, "y", (0, 1, 2, 3)[: 3 + len(work.terms)], H100)
    family = family_of(region, H100)
    assert isinstance(family, AttentionFamily)
    return family


def test_hopper_attends_by_example_88_where_it_is_faster() -> None:
    """By the model, of 8192 queries and keys; example 41's templates stay candidates."""
    length, features = 8192, 64
    row = H * features
    operand = replace(plain().query, size=B * length * row, batch=((B, length * row), (H, features)), row_stride=row)
    work = plain(queries=length, keys=length, features=features, value_features=features)
    work = replace(work, query=operand, key=operand, value=operand, output=operand)
    names = [one.config.name for one in hopper(work).propose()]
    assert names[0] == "attention_sm90_128x64x64_a8"
    assert sum("sm90" in name for name in names) == 3  # those for 64 features or more
    assert any("sm80" in name for name in names)


def test_a_mask_is_example_88s_as_well() -> None:
    """And with one, scores may be scaled by any number, for they are before their largest is taken."""
    family = hopper(plain(terms=(ScoreTerm(change="add", operand=MASK),), scale=-0.5))
    collective = [config for config in family.legal() if config.is_collective]
    assert len(collective) == 4
    assert all(config.name.endswith("_biased") for config in collective)
    without = hopper(plain())
    for config in collective:
        assert family.predict(config).full_clock_us > without.predict(replace(config, biased=False)).full_clock_us


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"queries": 12}, "multiples of 8"),
        (
            {"value_features": 4, "output": replace(plain().output, batch=((B, S * 12), (H, 4)), row_stride=12)},
            "as many",
        ),
        ({"scale": -0.5}, "positive number"),
        ({"key": replace(plain().key, batch=((B, S * H * D), (H, 0)))}, "no row for several heads"),
        ({"value": replace(plain().value, offset=4)}, "16 bytes"),
    ],
)
def test_what_example_88_cannot_read_is_left_to_example_41(changed: dict[str, Any], words: str) -> None:
    work = plain(**changed)
    if "queries" in changed:
        work = replace(work, output=replace(work.output, batch=((B, 12 * H * D), (H, D))))
    family = hopper(work)
    reasons = {family.why_illegal(config) for config in family.candidates() if config.is_collective}
    assert any(words in str(reason) for reason in reasons)
    assert None not in reasons
    assert {config.architecture for config in family.legal()} == {80}


TOLD_OF_THE_MASK = """
extern "C" void masked(AttentionCall const* call, int batch, int head, int block, int step, float* tile) {{
  using namespace {space};
  auto const given = make_arguments(*call).mask;
  by_threads<MainLoop::TiledMmaQK, MainLoop::TileShapeQK>(block, step, tile, [&](auto& scores, auto const& places) {{
    tvm_ext::Masked::change(given, batch, head, scores, places);
  }});
}}
"""
DESCRIBED = """
extern "C" int64_t described(AttentionCall const* call, int64_t* out) {{
  using namespace {space};
  auto const given = make_arguments(*call);
  auto const& kernel = given.kernel;
  cute::for_each(kernel.problem_size, [&](int extent) {{ *out++ = extent; }});
  auto told = [&](void const* at, void const* base, auto const& strides) {{
    *out++ = (static_cast<char const*>(at) - static_cast<char const*>(base)) / 2;
    *out++ = cute::get<0>(strides);
    *out++ = cute::get<2, 0>(strides);
    *out++ = cute::get<2, 1>(strides);
  }};
  told(kernel.mainloop.ptr_Q, call->q, kernel.mainloop.dQ);
  told(kernel.mainloop.ptr_K, call->k, kernel.mainloop.dK);
  told(kernel.mainloop.ptr_V, call->v, kernel.mainloop.dV);
  told(kernel.epilogue.ptr_O, call->d, kernel.epilogue.dO);
  *out++ = cute::get<1, 0>(kernel.epilogue.dLSE);
  *out++ = cute::get<1, 1>(kernel.epilogue.dLSE);
  *out++ = int64_t(given.scale * 1024);
  return Attention::can_implement(given) == cutlass::Status::kSuccess;
}}
"""


class AttentionCall(ctypes.Structure):
    """`emit_attention.ATTENTION_CALL`, of C."""

    _fields_ = [
        *((f"distance{i}", ctypes.c_int64) for i in range(16)),
        *((f"extent{i}", ctypes.c_int32) for i in range(8)),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "operands", "d")),
    ]


@pytest.mark.slow
@needs_nvcc
def test_example_88_is_told_where_every_row_lies(tmp_path: Path) -> None:
    """On the CPU: extents, addresses and distances as the template's own structure has them, and the workspace."""
    work = plain(query=replace(plain().query, offset=16))
    family = hopper(work)
    config = next(config for config in family.legal() if config.is_collective)
    symbol = family.symbol(config)
    library = host_library(family.source(config) + DESCRIBED.format(space=f"{symbol}_template"), tmp_path)
    call = AttentionCall(*family.numbers(config), *(16 << 20, 32 << 20, 48 << 20, None, 64 << 20))
    found = (ctypes.c_int64 * 24)()
    assert library.described(ctypes.byref(call), found) == 1
    assert tuple(found[:5]) == (B, H, S, S, D)
    for at, operand in zip((5, 9, 13, 17), (work.query, work.key, work.value, work.output), strict=True):
        begins, row_stride, batch_stride, head_stride = found[at : at + 4]
        for batch, head, row in product(range(B), range(H), range(S)):
            told = begins + batch * batch_stride + head * head_stride + row * row_stride
            assert told == place(operand, batch * H + head, row)
    assert tuple(found[21:24]) == (H * S, S, 512)
    ask = getattr(library, f"{symbol}_workspace_bytes")
    ask.restype = ctypes.c_int64
    assert ask(ctypes.byref(call)) == B * H * S * 4
    call.extent4 = D // 2  # features of a key
    assert ask(ctypes.byref(call)) == -1


@pytest.mark.slow
@needs_nvcc
def test_example_88_adds_the_mask_where_it_belongs(tmp_path: Path) -> None:
    """On the CPU, thread by thread: [B, 1, 1, S] and [B, H, S, S], in a tile that reaches beyond queries and keys."""
    length = 200
    operand = replace(plain().query, size=B * length * H * D, batch=((B, length * H * D), (H, D)))
    work = plain(queries=length, keys=length, query=operand, key=operand, value=operand, output=operand)
    rng = np.random.default_rng(3)
    library: ctypes.CDLL | None = None
    for row, head in ((0, 0), (length, length * length)):
        shape = (B, H, length, length) if row else (B, 1, 1, length)
        mask = rng.normal(size=shape).astype("float16")
        read = MatrixOperand(
            dtype="float16", size=mask.size, offset=0, batch=((B, mask[0].size), (H, head)), row_stride=row,
            column_stride=1,
        )  # fmt: skip
        family = hopper(replace(work, terms=(ScoreTerm(change="add", operand=read),)))
        config = next(config for config in family.legal() if config.is_collective)
        if library is None:  # one text for both
            space = f"{family.symbol(config)}_template"
            library = host_library(family.source(config) + BY_THREADS + TOLD_OF_THE_MASK.format(space=space), tmp_path)
        operands = (ctypes.c_void_p * 1)(address(mask))
        factors = (16 << 20, 32 << 20, 48 << 20, ctypes.addressof(operands), 64 << 20)
        call = AttentionCall(*family.numbers(config), *factors)
        whole = np.broadcast_to(mask, (B, H, length, length))
        tile = (config.queries, config.keys)
        sums = rng.normal(size=tile).astype("float32")
        for batch, at, block, step in ((0, 0, 0, 0), (1, 2, 1, length // config.keys)):
            scores = sums.copy()
            library.masked(ctypes.byref(call), batch, at, block, step, ctypes.c_void_p(address(scores)))
            part = whole[batch, at, block * tile[0] :, step * tile[1] :][: tile[0], : tile[1]]
            expected = sums * np.float32(work.scale)
            expected[: part.shape[0], : part.shape[1]] += part
            np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("features", [32, 64, 128, 256])
@pytest.mark.parametrize("masked", [False, True])
def test_example_88_compiles_without_spills(features: int, masked: bool) -> None:
    """Each of its tiles."""
    tile = next(tile for tile in HOPPER_TILES if tile[2] == features)
    text = emit_attention("tvm_ext_attention", "attention", architecture=90, tile=tile, wide=True, biased=masked)
    (use,) = compile_gemm(text, "sm_90a", time_limit_s=580, output="fatbin").uses
    assert not use.spills


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("device", "architecture"), [("nvidia-t4", "sm_75"), ("nvidia-a100", "sm_80")])
def test_the_kernel_compiles(device: str, architecture: str, masked: bool) -> None:
    family = family_of(taken(encoder(masked=masked), device), lookup(device))
    for config in family.legal():
        (use,) = compile_gemm(family.source(config), architecture).uses
        assert use.spill_store_bytes <= 32, config.name  # of the tile for more than 128 features; 0 of all others
        assert config.most_features > 128 or not use.spills
