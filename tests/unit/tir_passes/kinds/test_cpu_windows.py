"""Window kernels in other tiles than construction's: all that are candidates are legal, all others are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tvm import relax

from tests.unit.kernels import cpu, legalised, unscheduled_operator
from tvm_ext.devices import device_db
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, CONSTANT_PARAMS, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import WindowTile
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.kinds.cpu_windows import WindowPart
from tvm_ext.tir_passes.kinds.registry import tunable_parts
from tvm_ext.tir_passes.plan.chosen_tiles import CHOSEN, LEFT_OUT

op = relax.op
CORES = device_db.lookup("cpu-epyc-zen5")
DEVICES = {
    "cores": CORES,
    "one core": with_unit_count(CORES, 1),
    "AVX2": device_db.lookup("cpu-avx2"),
    "many": with_unit_count(CORES, 64),
}


def depthwise(channels: int = 8, height: int = 57, width: int = 61, stride: int = 1, taps: int = 3) -> Any:
    return legalised(
        lambda x, w: op.nn.relu(op.nn.conv2d(x, w, groups=channels, strides=stride, padding=taps // 2)),
        (1, channels, height, width),
        (channels, 1, taps, taps),
    ).with_attr(CONSTANT_PARAMS, [1])


def pool() -> Any:
    return legalised(lambda x: op.nn.avg_pool2d(x, (3, 3), strides=(2, 2), padding=(1, 1)), (2, 3, 30, 11))


FUNCTIONS = {
    "depthwise": depthwise,
    "strided": lambda: depthwise(3, 112, 112, 2, 5),
    "narrow": lambda: depthwise(64, 7, 7),
    "pool": pool,
    "tall": lambda: depthwise(1, 400, 30),
}


def part_of(func: Any, device: DeviceSpec | None = None) -> WindowPart:
    (part,) = tunable_parts(unscheduled_operator(func, device=device or cpu()))
    assert isinstance(part, WindowPart)
    return part


def candidates_of(func: Any, device: DeviceSpec) -> Sequence[tuple[WindowTile, float]]:
    return part_of(func, device).candidates().found


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_candidate_is_a_layout_of_its_own(name: str, device: str) -> None:
    cpu_ = DEVICES[device]
    part = part_of(FUNCTIONS[name](), cpu_)
    found = part.candidates().found
    assert len(found) >= 20
    assert all(0 < seconds < 1 for _, seconds in found)
    for tile, _ in found[:: max(1, len(found) // 12)]:
        assert from_json(WindowTile, tile.configuration) == tile
        assert (not tile.forks) or cpu_.unit_count > 1
        assert part.layout_of(tile)[0].band == tile.band


@pytest.mark.parametrize("name", FUNCTIONS)
def test_constructions_own_tile_is_the_first_candidate(name: str) -> None:
    """Chosen, it is the same kernel; and the model expects no other to be far better."""
    part = part_of(FUNCTIONS[name](), DEVICES["cores"])
    found = part.candidates().found
    (plain,), (made,) = part.forms(), part.forms(found[0][0])
    assert (plain.notes, list(map(str, plain.statements))) == (made.notes, list(map(str, made.statements)))
    assert min(seconds for _, seconds in found) > 0.5 * found[0][1]


def test_what_cores_divide_is_chosen_where_the_launch_counts() -> None:
    small, large = depthwise(2, 9, 20), depthwise(64, 112, 112)
    assert {tile.forks for tile, _ in candidates_of(small, CORES)} == {True, False}
    assert {tile.forks for tile, _ in candidates_of(large, DEVICES["many"])} == {True}
    assert {tile.forks for tile, _ in candidates_of(large, DEVICES["one core"])} == {False}
    part = part_of(small, CORES)
    for forks in (True, False):
        tile = next(tile for tile, _ in part.candidates().found if tile.forks == forks)
        text = str(part.forms(tile)[0].statements[-1])
        assert ("T.parallel" in text) == forks


def test_chosen_by_its_key_and_refused_with_a_reason() -> None:
    func, device, options = depthwise(), cpu(), BuildOptions()
    key = part_of(func).key().key
    tile = candidates_of(func, device)[-1][0]
    made = construct_kernel(func, "operator", device, options, {key: tile.configuration})
    assert f"{CHOSEN}{tile.configuration}" in notes_of(made)
    plain = construct_kernel(func, "operator", device, options)
    wrong = (
        "no JSON",
        "{}",
        replace(tile, band=58).configuration,
        replace(tile, rows=9999).configuration,
        replace(tile, width=5).configuration,
        tile.configuration.replace(str(tile.band), "-1", 1),
    )
    for text in wrong:
        left = construct_kernel(func, "operator", device, options, {key: text})
        assert any(note.startswith(LEFT_OUT) for note in notes_of(left))
        assert str(left.body) == str(plain.body)


def notes_of(kernel: Any) -> tuple[str, ...]:
    return from_json(KernelChoice, str(kernel.attrs[CHOICE])).notes


def test_one_core_has_no_tasks_to_divide() -> None:
    tile = next(tile for tile, _ in candidates_of(depthwise(), CORES) if tile.forks)
    with pytest.raises(IllegalRewrite, match="one core alone"):
        part_of(depthwise(), DEVICES["one core"]).layout_of(tile)


def test_keys_know_what_decides_a_time_and_no_names() -> None:
    def key(func: Any, device: DeviceSpec = CORES) -> str:
        (part,) = tunable_parts(unscheduled_operator(func, device=device))
        return part.key().key

    assert key(depthwise()) == key(depthwise())
    others = [depthwise(9), depthwise(stride=2), depthwise(taps=5), pool(), depthwise(height=58)]
    assert len({key(depthwise()), *map(key, others), key(depthwise(), DEVICES["one core"])}) == 7
