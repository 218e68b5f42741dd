"""Which configurations of convolutions are proposed: legal by the headers' rules, for every device, and ranked."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from tests.support.random_templates.convolutions import (
    KINDS,
    AnyConfig,
    convolution_family,
    convolution_of,
    random_problem,
)
from tests.support.random_templates.products import CAPABILITIES, EXPRESSIONS, device_of, epilogue_of
from tvm_ext.byoc_cutlass.convolution import ConvolutionConfig, DepthwiseConfig
from tvm_ext.byoc_cutlass.convolutions import ConvolutionFamily
from tvm_ext.byoc_cutlass.depthwise import DepthwiseFamily
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.family import MOST_CONFIGS, Ranked, TemplateFamily
from tvm_ext.byoc_cutlass.gemm import GemmConfig
from tvm_ext.devices import device_db
from tvm_ext.errors import TargetError
from tvm_ext.records.partition import CutlassProblem
from tvm_ext.records.serialise import from_json, to_json

PLAIN = Epilogue(out_dtype="float16")
A100, H100, T4 = (8, 0), (9, 0), (7, 5)


def proposals(
    problem: CutlassProblem, capability: tuple[int, int], epilogue: Epilogue = PLAIN, count: int = MOST_CONFIGS
) -> tuple[Ranked[Any], ...]:
    return convolution_family(problem, device_of(capability), epilogue).propose(count)


def why_illegal(
    config: AnyConfig, problem: CutlassProblem, capability: tuple[int, int], epilogue: Epilogue = PLAIN
) -> str:
    """By the family that the configuration is of, whatever the problem is."""
    kind = DepthwiseFamily if isinstance(config, DepthwiseConfig) else ConvolutionFamily
    return kind(problem, device_of(capability), epilogue).why_illegal(config) or "legal"


def first(problem: CutlassProblem, capability: tuple[int, int] = A100) -> Any:
    return proposals(problem, capability, epilogue_of("relu(accum + row)", problem.dtypes[2]))[0].config


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_is_proposed_is_legal_and_sorted(kind: str, capability: tuple[int, int]) -> None:
    rng = random.Random(f"{kind} {capability}")
    problem = random_problem(rng, kind, capability)
    epilogue = epilogue_of(rng.choice(EXPRESSIONS), problem.dtypes[2])
    family: TemplateFamily[Any] = convolution_family(problem, device_of(capability), epilogue)
    found = family.propose()
    assert len(found) <= MOST_CONFIGS
    times = [round(item.time_us, 3) for item in found]
    assert times == sorted(times)
    assert bool(found) == (family.why_none() is None)
    for item in found:
        assert family.why_illegal(item.config) is None
        assert item.time_us > 0
        assert steps_cover_the_depth(item.config, family)


def steps_cover_the_depth(config: AnyConfig, family: Any) -> bool:
    """Every product of an activation and a weight is in a step of some slice."""
    if isinstance(config, DepthwiseConfig):
        return family.tiles(config) * config.pixels[0] * config.pixels[1] >= family.problem.rows
    return family.steps(config) * config.tile.split_k * config.tile.threadblock[2] >= family.problem.depth


def test_one_position_is_a_matrix_product_where_the_model_says_so() -> None:
    plain = convolution_of(window=(1, 1), extents=(56, 56), channels=256)
    assert first(plain).iterator == "plain"
    found = proposals(plain, A100, count=10**6)
    assert {item.config.iterator for item in found} == {"plain", "optimized"}
    for changed in (
        convolution_of(window=(1, 1), stride=2),
        convolution_of(window=(1, 1), padding=(1, 1)),
        convolution_of(window=(3, 3)),
    ):
        assert changed.window is not None and not changed.window.is_plain
        assert first(changed).iterator != "plain"


def test_float32_is_not_rounded_to_tfloat32_by_a_collective() -> None:
    exact, rounded = convolution_of(dtype="float32"), convolution_of(dtype="tfloat32", out_dtype="float32")
    configs = [
        [item.config for item in proposals(p, H100, epilogue_of("accum", "float32"), count=10**6)]
        for p in (exact, rounded)
    ]
    assert {item.tile.generation for item in configs[0]} == {"2.x"}
    assert {item.tile.generation for item in configs[1]} == {"2.x", "3.x"}


@pytest.mark.parametrize(
    ("channels", "iterator", "architecture"),
    [(3, "few_channels", 75), (4, "fixed_channels", 80), (64, "optimized", 80)],
)
def test_first_layers_have_iterators_of_their_own(channels: int, iterator: str, architecture: int) -> None:
    """Three halves are 6 bytes, which asynchronous copies do not take: sm_75's templates do."""
    found = first(convolution_of(extents=(224, 224), channels=channels, window=(7, 7), stride=2))
    assert (found.iterator, found.tile.architecture) == (iterator, architecture)
    assert (found.tile.stages == 2) == (architecture == 75)


def test_groups_are_whole_tiles_or_tiles_whole_groups() -> None:
    single, multiple = (
        first(convolution_of(channels=groups * size, filters=groups * size, groups=groups))
        for groups, size in ((2, 256), (32, 4))
    )
    assert (single.grouping, multiple.grouping) == ("single", "multiple")
    assert 256 % single.tile.threadblock[1] == 0
    assert multiple.tile.threadblock[1] % 4 == 0
    assert multiple.iterator == "analytic"


def test_hopper_copies_windows_in_bulk_where_the_epilogue_reads_one_whole_matrix_at_most() -> None:
    problem = convolution_of(batch=32, extents=(56, 56))
    assert first(problem, H100).iterator == "bulk"
    one = epilogue_of("accum + matrix", "float16")
    assert proposals(problem, H100, one)[0].config.iterator == "bulk"
    other = dataclasses.replace(one.operands[0], name="other")
    two = dataclasses.replace(one, expression="accum * other + matrix", operands=(*one.operands, other))
    residual = proposals(problem, H100, two)
    assert {item.config.tile.generation for item in residual} == {"2.x"}


def test_channels_are_split_where_the_result_is_small() -> None:
    found = first(convolution_of(batch=1, extents=(7, 7), channels=2048, filters=64))
    assert found.tile.split_k > 1
    assert first(convolution_of(batch=32, extents=(56, 56))).tile.split_k == 1


def test_aligned_channels_are_predicted_to_be_faster() -> None:
    """Bolt's Table 3: 46 channels, and padded to 48."""
    times = [
        proposals(convolution_of(batch=32, extents=(20, 26), channels=c, filters=32), A100)[0].time_us for c in (46, 48)
    ]
    assert times[0] > 1.2 * times[1]


def test_more_work_takes_longer() -> None:
    device = device_of(A100)
    config = first(convolution_of())
    families = [ConvolutionFamily(convolution_of(batch=batch), device, PLAIN) for batch in (8, 64, 512)]
    times = [family.predict(config).time_us for family in families]
    assert times == sorted(times)
    assert times[0] < times[-1]


TILE = GemmConfig(
    arithmetic="float16",
    architecture=80,
    threadblock=(128, 64, 32),
    warp=(64, 32, 32),
    instruction=(16, 8, 16),
    stages=3,
    alignment_a=8,
    alignment_b=8,
    alignment_d=8,
)
BASE = ConvolutionConfig(tile=TILE, iterator="optimized")
BULK = ConvolutionConfig(
    tile=GemmConfig(
        arithmetic="float16",
        architecture=90,
        threadblock=(128, 64, 64),
        stages=3,
        alignment_a=8,
        alignment_b=8,
        alignment_d=8,
        schedule="single",
    ),
    iterator="bulk",
)
DIRECT = DepthwiseConfig(
    arithmetic="float16",
    pixels=(8, 8),
    channels=64,
    warp_pixels=16,
    filter_extents=(3, 3),
    strides=(1, 1),
    dilation=(1, 1),
    stages=3,
)


@pytest.mark.parametrize(
    ("config", "problem", "why"),
    [
        (BASE, {"window": (33, 3)}, "masks for 32 positions"),
        (BASE, {"channels": 4}, "alignment_a 8 is more than the problem's 4"),
        (BASE, {"groups": 2}, "templates without groups are for one group"),
        (dataclasses.replace(BASE, iterator="plain"), {}, "only filters of one position"),
        (dataclasses.replace(BASE, iterator="fixed_channels"), {}, "fixed channels are those of one access"),
        (dataclasses.replace(BASE, grouping="single"), {"groups": 2}, "no whole tiles of 64"),
        (dataclasses.replace(BASE, grouping="multiple"), {"groups": 2}, "for the analytic iterator"),
        (dataclasses.replace(BASE, iterator="bulk"), {}, "one warp group that multiplies"),
        (BASE.with_split(4), {}, "64 channels are no 4 slices"),
        (dataclasses.replace(BASE, iterator="few_channels").with_split(2), {}, "no slices of channels"),
        (BASE, {"batch": 4096, "extents": (112, 112)}, "is too large for templates"),
        (BULK, {"groups": 2}, "templates without groups"),
        (BULK, {"stride": 9}, "no such padding, stride or dilation"),
        (BULK, {"dilation": 128}, "no such padding, stride or dilation"),
        (BULK, {"extents": (600, 600), "padding": (129, 0)}, "no such padding, stride or dilation"),
        (dataclasses.replace(BULK, iterator="optimized"), {}, "a single warp group multiplies in convolutions alone"),
        (DIRECT, {}, "for depthwise convolutions of float16"),
        (DIRECT, {"groups": 64, "window": (5, 5)}, "extents are others than the template's"),
        (DIRECT, {"groups": 64, "stride": 2}, "strides or dilation are others"),
        (DIRECT, {"groups": 36, "channels": 36, "filters": 36}, "pad them to a multiple of 8"),
        (dataclasses.replace(DIRECT, warp_pixels=32), {"groups": 64}, "warps have no such tile"),
        (dataclasses.replace(DIRECT, pixels=(6, 8)), {"groups": 64}, "no whole number"),
        (dataclasses.replace(DIRECT, stages=40), {"groups": 64}, "bytes of shared memory"),
    ],
)
def test_what_the_headers_refuse_is_refused(config: AnyConfig, problem: dict[str, Any], why: str) -> None:
    fits = convolution_of(groups=64) if isinstance(config, DepthwiseConfig) else convolution_of()
    base = BULK if isinstance(config, ConvolutionConfig) and config.tile.generation == "3.x" else BASE
    assert why_illegal(DIRECT if isinstance(config, DepthwiseConfig) else base, fits, H100) == "legal"
    assert why in why_illegal(config, convolution_of(**problem), H100)


def test_what_would_be_spilled_is_refused() -> None:
    """ptxas spilt 1960 and 1716 bytes of such kernels, and 368 of the depthwise one."""
    narrow = dataclasses.replace(TILE, threadblock=(256, 64, 32), warp=(64, 64, 32), stages=4)
    for alignment, why in ((8, "legal"), (2, "registers of a thread")):
        tile = dataclasses.replace(narrow, alignment_a=alignment, alignment_b=alignment)
        config = ConvolutionConfig(tile=tile, iterator="optimized")
        assert why in why_illegal(config, convolution_of(), A100)
    wide = dataclasses.replace(
        TILE, architecture=75, threadblock=(256, 128, 64), warp=(64, 64, 64), instruction=(16, 8, 8), stages=2,
        alignment_a=1, alignment_b=1,
    )  # fmt: skip
    config = ConvolutionConfig(tile=wide, iterator="optimized")
    problem = convolution_of(channels=3)
    assert "registers of a thread" in why_illegal(config, problem, A100)
    direct = dataclasses.replace(DIRECT, filter_extents=(7, 7), strides=(2, 2), pixels=(4, 8), warp_pixels=8)
    problem = convolution_of(window=(7, 7), stride=2, groups=64)
    assert "registers of a thread" in why_illegal(direct, problem, A100)


def test_nothing_serves_odd_channels_of_bfloat16() -> None:
    problem = convolution_of(channels=3, dtype="bfloat16")
    family = ConvolutionFamily(problem, device_of(A100), PLAIN)
    assert family.propose() == ()
    assert "copied asynchronously" in (family.why_none() or "")


def test_devices_without_templates_are_refused() -> None:
    with pytest.raises(TargetError, match=r"begin with CUDA's compute capability 7\.5"):
        ConvolutionFamily(convolution_of(), device_db.lookup("nvidia-v100"), PLAIN)


def test_configurations_go_through_json() -> None:
    for problem in (convolution_of(), convolution_of(groups=64)):
        for config in list(convolution_family(problem, device_of(H100), PLAIN).candidates())[::97]:
            assert from_json(type(config), to_json(config)) == config


@pytest.mark.parametrize(("stride", "extent", "behind"), [(1, 28, 1), (2, 28, 0), (2, 27, 1), (3, 29, 0)])
def test_what_is_padded_behind_follows_from_the_result(stride: int, extent: int, behind: int) -> None:
    """(28 + 1 + b - 3) // 2 + 1 = 14 for b of 0 and 1: nothing is padded that nothing reads."""
    problem = convolution_of(extents=(extent, extent), stride=stride)
    assert problem.window is not None
    assert problem.window.padding_behind == (behind, behind)
