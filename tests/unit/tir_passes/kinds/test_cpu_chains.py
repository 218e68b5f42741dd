"""Candidates of a chain: construction's own first, tiles by what their stores meet, and panels looked at once each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.chain_modules import Conv, conv_chain
from tests.unit.kernels import unscheduled_operator
from tvm_ext._tvm import PrimFunc, Sequential
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import operator_pipeline, plan_build
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.persistent import CHAIN
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import PanelTiles
from tvm_ext.relay_passes.annotate_constants import AnnotateConstants
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.kinds import cpu_chains
from tvm_ext.tir_passes.kinds.cpu_chains import ChainPart
from tvm_ext.tir_passes.kinds.registry import tunable_parts
from tvm_ext.tir_passes.plan.chain import panel_ways
from tvm_ext.tir_passes.plan.panel import divide
from tvm_ext.tir_passes.plan.plan_kernels import plan

PLAN = plan_build(
    "llvm", BuildOptions(device="cpu-cascade-lake", enable_persistent_fusion=True, num_threads=1, database="off")
)


@pytest.fixture(scope="module")
def func() -> PrimFunc:
    """1x1 convolutions of 32 to 16 to 96 channels, 112 x 112, as MobileNetV2 has them: 4.8 MB are written."""
    chain = conv_chain((1, 32, 112, 112), Conv(filters=16), Conv(filters=96))
    with PLAN.target:
        passes = [operator_pipeline(PLAN.target, PLAN.device, PLAN.options), AnnotateConstants()]
        operators = Sequential(passes)(chain.mod)
    (found,) = [item for _, item in operators.functions_items() if isinstance(item, PrimFunc)]
    assert CHAIN in found.attrs
    return found


@pytest.fixture(scope="module")
def part(func: PrimFunc) -> ChainPart:
    (found,) = tunable_parts(unscheduled_operator(func, "chain", PLAN.device, PLAN.options))
    assert isinstance(found, ChainPart)
    return found


@pytest.fixture(scope="module")
def candidates(part: ChainPart) -> list[tuple[PanelTiles, float]]:
    return list(part.candidates().found)


def test_rows_of_the_whole_tensor_count_and_not_those_of_a_panel(part: ChainPart) -> None:
    """In a panel of one row, or of half of one, 96 rows of the result are a few hundred bytes apart, in truth 50 KB."""
    for sizes in ({0: 1, 2: 1}, {0: 1, 2: 1, 3: 56}):
        panel = divide(part.context.operator, sizes)
        ways = panel_ways(plan(panel.operator)[-1], panel, part.context)
        followed = {}
        for way in ways:
            assert way.tile is not None
            (written,) = (item for item in way.stage.moved if item.written)
            followed[way.tile] = written.followed
        across = [tile for tile in followed if tile.vector == 0 and tile.register[0] > 32]
        assert across
        assert not any(followed[tile] for tile in across)
        assert followed[ways[0].tile or across[0]]


def test_construction_takes_the_first_candidate(func: PrimFunc, part: ChainPart, candidates: Any) -> None:
    own = candidates[0][0]
    assert own.panels == part.usual
    assert candidates[0][1] == min(seconds for tiles, seconds in candidates if tiles.panels == own.panels)
    with PLAN.target:
        tiles = {part.key().key: own.configuration}
        made = [construct_kernel(func, "chain", PLAN.device, PLAN.options, item) for item in ({}, tiles)]
    texts = [item.without_attr(CHOICE).script() for item in made]
    assert texts[0] == texts[1]
    assert from_json(KernelChoice, str(made[0].attrs[CHOICE])).path == "rtile"


def test_a_panel_is_looked_at_once_and_not_for_each_candidate(
    part: ChainPart, candidates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(cpu_chains, "plan", lambda operator: looked.append(operator) or plan(operator))
    again = list(part.candidates().found)
    assert again == candidates
    assert len(looked) <= 1 + len(cpu_chains.MORE_FILLS) < len(candidates)
