"""Tiles chosen from outside: they are emitted as they say, and what does not fit is left out with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.unit.kernels import cpu, legalised, run, unscheduled_operator
from tvm_ext.cost.cpu_tiles import program_of, tile_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, CONSTANT_PARAMS, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.kernel_cache import KERNEL_KEY, KernelCache
from tvm_ext.tir_passes.construct_kernels import ConstructKernels, construct_kernel
from tvm_ext.tir_passes.kinds.cpu_tiles import TilePart
from tvm_ext.tir_passes.kinds.registry import own_choices, tunable_parts

OPTIONS = BuildOptions()


def product() -> Any:
    func = legalised(lambda a, b: relax.op.nn.relu(relax.op.matmul(a, b)), (50, 40), (40, 70))
    return func.with_attr(CONSTANT_PARAMS, [1])


def convolution() -> Any:
    func = legalised(lambda x, w: relax.op.nn.conv2d(x, w, padding=1), (1, 8, 13, 13), (20, 8, 3, 3))
    return func.with_attr(CONSTANT_PARAMS, [1])


MAKERS = {"product": product, "convolution": convolution}


def kernel(func: Any, tiles: dict[str, str]) -> tuple[Any, KernelChoice]:
    made = construct_kernel(func, "operator", cpu(), OPTIONS, tiles)
    return made, from_json(KernelChoice, str(made.attrs[CHOICE]))


def part_of(func: Any, name: str = "operator", device: DeviceSpec | None = None) -> TilePart:
    (part,) = tunable_parts(unscheduled_operator(func, name, device, OPTIONS))
    assert isinstance(part, TilePart)
    return part


def constructed(part: TilePart) -> CpuTile:
    return part.candidates().found[0][0]


def text_of(made: Any) -> str:
    return str(made.without_attr(CHOICE).script())


def other(tile: CpuTile) -> CpuTile:
    """Smaller register tiles, in loops the other way round."""
    rows = tuple(1 if axis != tile.vector else size for axis, size in enumerate(tile.register))
    ones = (1,) * len(rows)
    return CpuTile(vector=tile.vector, register=rows, inner=ones, outer=ones, order=tuple(reversed(tile.order)))


@pytest.mark.parametrize("make", [product, convolution])
def test_a_chosen_tile_is_emitted_and_computes_the_same(make: Any) -> None:
    func = make()
    part = part_of(func)
    wanted = other(constructed(part))
    assert wanted != constructed(part)
    plain, _ = kernel(func, {})
    made, choice = kernel(func, {part.key().key: wanted.configuration})
    assert choice.program is not None
    assert tile_of(choice.program, part.anchor.expr) == wanted
    assert "tile chosen by measurement" in choice.reason
    assert text_of(plain) != text_of(made)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(n) for n in p.ty.shape]).astype("float32") for p in func.params]
    found = run(made, choice, arrays[:-1], arrays[-1].shape, "float32")
    if make is product:
        expected = np.maximum(arrays[0].astype("float64") @ arrays[1], 0)
    else:
        padded = np.pad(arrays[0].astype("float64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        expected = np.einsum("nchwij,ocij->nohw", windows, arrays[1])
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


def test_choosing_the_constructed_tile_changes_nothing_but_the_reason() -> None:
    func = product()
    part = part_of(func)
    plain, before = kernel(func, {})
    made, choice = kernel(func, {part.key().key: constructed(part).configuration})
    assert text_of(plain) == text_of(made)
    assert choice.packs == before.packs
    assert choice.reason != before.reason


def test_what_is_measured_does_not_depend_on_names() -> None:
    """The same product under other names has the same key; another size, device or thread count has another."""
    one = part_of(product(), "operator")
    same = part_of(product(), "elsewhere")
    assert one.key() == same.key()
    threads = replace(cpu(), unit_count=cpu().unit_count + 1)
    variants = [
        part_of(convolution()),
        part_of(product().without_attr(CONSTANT_PARAMS)),
        part_of(product(), "operator", threads),
    ]
    assert len({item.key().key for item in (one, *variants)}) == 4


def test_a_tile_that_does_not_fit_is_left_out_with_a_reason() -> None:
    func = product()
    part = part_of(func)
    plain, _ = kernel(func, {})
    tile = constructed(part)
    wrong = [
        "no JSON",
        '{"vector":9}',
        replace(tile, register=(50, 70)).configuration,  # too many registers
        replace(tile, register=(51, tile.register[1])).configuration,
        CpuTile(vector=0, register=(1,), inner=(1,), outer=(1,), order=(0,)).configuration,
        replace(tile, inner=(1, 1), outer=(1000, 1)).configuration,
    ]
    for text in wrong:
        made, choice = kernel(func, {part.key().key: text})
        assert text_of(plain) == text_of(made)
        assert "a chosen tile is left out" in choice.reason
        assert choice.path == "rtile"


def test_every_constructed_program_is_the_program_of_its_tile() -> None:
    """Also its predicted time, where no tile is padded beyond its axis."""
    for func in (product(), convolution()):
        part = part_of(func)
        for program in part.anchor.programs:
            again = program_of(tile_of(program, part.anchor.expr), part.anchor.expr, cpu())
            assert tile_of(again, part.anchor.expr) == tile_of(program, part.anchor.expr)
            assert again.prediction.compute_s == pytest.approx(program.prediction.compute_s, rel=0.05)


def keys_of(tiles: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """By function, the keys under which a build with ``tiles`` looks its kernels up."""
    mod = tvm.IRModule({name: make().with_attr("global_symbol", name) for name, make in MAKERS.items()})
    made = ConstructKernels(cpu(), OPTIONS, cache=KernelCache(tmp_path), tiles=tiles)(mod)
    return {name: str(made[name].attrs[KERNEL_KEY]) for name in MAKERS}


def test_a_chosen_tile_is_in_the_key_of_its_own_kernel_alone(tmp_path: Path) -> None:
    """Tuning one model leaves the machine code of all others where it is."""
    parts = {name: part_of(make(), name) for name, make in MAKERS.items()}
    key, tile = parts["product"].key().key, constructed(parts["product"])
    plain = keys_of({}, tmp_path)
    assert keys_of({"elsewhere": "{}"}, tmp_path) == plain
    one = keys_of({key: tile.configuration, "elsewhere": "{}"}, tmp_path)
    two = keys_of({key: other(tile).configuration}, tmp_path)
    assert len({plain["product"], one["product"], two["product"]}) == 3
    assert plain["convolution"] == one["convolution"] == two["convolution"]


def test_the_parts_of_a_kernel_have_the_keys_that_construction_looks_up() -> None:
    for name, make in MAKERS.items():
        part = part_of(make(), name)
        tiles = {part.key().key: "a", "elsewhere": "b"}
        assert own_choices(unscheduled_operator(make(), name, options=OPTIONS), tiles) == {part.key().key: "a"}
