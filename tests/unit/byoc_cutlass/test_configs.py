"""Which configurations are proposed: legal by the headers' rules, for every device, and ranked as the guidance says."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.random_templates.products import (
    CAPABILITIES,
    EXPRESSIONS,
    arithmetics_of,
    device_of,
    epilogue_of,
    legal_configs,
)
from tvm_ext.byoc_cutlass.elements import MULTIPLIERS
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.family import MOST_CONFIGS
from tvm_ext.byoc_cutlass.gemm import ACCESS_BITS, GemmConfig, packed_problem, widest_access
from tvm_ext.byoc_cutlass.products import ProductFamily
from tvm_ext.devices import device_db
from tvm_ext.devices.occupancy import blocks_per_unit
from tvm_ext.errors import InputError, TargetError
from tvm_ext.records.partition import CutlassProblem
from tvm_ext.records.serialise import from_json, to_json

PLAIN = Epilogue(out_dtype="float16")
EXTENTS = st.sampled_from((1, 7, 8, 24, 64, 100, 512, 1000, 4096))


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[int, int], CutlassProblem]:
    capability = draw(st.sampled_from(CAPABILITIES))
    arithmetic = draw(st.sampled_from(arithmetics_of(device_of(capability))))
    problem = packed_problem(
        m=draw(EXTENTS),
        n=draw(EXTENTS),
        k=draw(EXTENTS),
        arithmetic=arithmetic,
        layout_a=draw(st.sampled_from(("row", "column"))),
        layout_b=draw(st.sampled_from(("row", "column"))),
        out_dtype=draw(st.sampled_from(("float16", "float32"))),
    )
    return capability, problem


@settings(max_examples=8, deadline=None)
@given(problems(), st.sampled_from(EXPRESSIONS))
def test_what_is_proposed_is_legal_fits_and_is_sorted(
    drawn: tuple[tuple[int, int], CutlassProblem], expression: str
) -> None:
    capability, problem = drawn
    device, epilogue = device_of(capability), epilogue_of(expression, problem.dtypes[2])
    family = ProductFamily(problem, device, epilogue)
    found = family.propose()
    assert len(found) <= MOST_CONFIGS
    fastest: dict[tuple[int, int], float] = {}  # of each tile; to the picosecond, for of equals warps' tiles decide
    for item in found:
        fastest.setdefault(item.config.threadblock[:2], round(item.time_us, 3))
        assert round(item.time_us, 3) >= fastest[item.config.threadblock[:2]]
    assert list(fastest.values()) == sorted(fastest.values())
    assert bool(found) == (family.why_none() is None)
    for item in found:
        assert family.why_illegal(item.config) is None
        assert blocks_per_unit(ProductFamily(problem, device, epilogue).use(item.config), device) >= 1
        assert item.time_us > 0


@settings(max_examples=8, deadline=None)
@given(problems())
def test_legal_configurations_have_what_the_headers_assert(drawn: tuple[tuple[int, int], CutlassProblem]) -> None:
    capability, problem = drawn
    for config in legal_configs(problem, device_of(capability), PLAIN)[::7]:
        m, n, k = config.threadblock
        assert problem.operands[0].alignment >= config.alignment_a
        if config.warp is not None and config.instruction is not None:
            assert (m % config.warp[0], n % config.warp[1], k % config.warp[2]) == (0, 0, 0)
            assert config.warp[2] // config.instruction[2] % 2 == 0
            assert config.warps >= 2
            assert (config.stages == 2) == (config.architecture < 80)
        else:
            assert capability == (9, 0)
            assert m % (128 if config.schedule == "cooperative" else 64) == 0
            assert k * MULTIPLIERS[config.arithmetic].bits == 8 * ACCESS_BITS


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_arithmetic_of_a_device_has_templates(capability: tuple[int, int]) -> None:
    device = device_of(capability)
    for arithmetic in arithmetics_of(device):
        problem = packed_problem(m=512, n=512, k=512, arithmetic=arithmetic, layout_b="column", out_dtype="float16")
        assert len(ProductFamily(problem, device, PLAIN).propose()) >= 16, arithmetic


def test_arithmetics_come_with_capabilities() -> None:
    known = {capability: set(arithmetics_of(device_of(capability))) for capability in CAPABILITIES}
    assert known[(7, 5)] == {"float16", "float32", "int8"}
    assert known[(8, 0)] == known[(8, 6)] == known[(7, 5)] | {"bfloat16", "tfloat32"}
    assert known[(8, 9)] == known[(9, 0)] == set(MULTIPLIERS)


def first(capability: tuple[int, int], m: int, n: int, k: int) -> GemmConfig:
    problem = packed_problem(m=m, n=n, k=k, arithmetic="float16", out_dtype="float16")
    return ProductFamily(problem, device_of(capability), PLAIN).propose()[0].config


def test_large_products_have_large_tiles_and_small_ones_many() -> None:
    """The vendor's guidance, Bolt §3.2.2."""
    large, small = first((8, 0), 4096, 4096, 4096), first((8, 0), 256, 256, 256)
    assert large.warp is not None
    assert large.warp[0] * large.warp[1] == 64 * 64
    assert large.warps in (4, 8)
    assert small.threadblock[0] * small.threadblock[1] < large.threadblock[0] * large.threadblock[1]


def test_k_is_split_where_the_result_is_small() -> None:
    assert first((8, 0), 64, 64, 16384).split_k > 1
    assert first((8, 0), 4096, 4096, 4096).split_k == 1


def test_hopper_multiplies_large_products_by_collectives() -> None:
    found = first((9, 0), 4096, 4096, 4096)
    assert found.generation == "3.x"
    assert found.stages > 2


def test_a_board_multiplies_no_faster_than_its_power_lasts() -> None:
    """A T4's products that go on take what 24 TFLOP/s take; which tile is best, its full clock still says."""
    problem = packed_problem(m=4096, n=4096, k=4096, arithmetic="float16", out_dtype="float16")
    board = device_of((7, 5))
    best = ProductFamily(problem, board, PLAIN).propose()[0]
    free = ProductFamily(problem, dataclasses.replace(board, power_share=None), PLAIN).propose()[0]
    assert best.time_us == pytest.approx(2 * 4096**3 / 24e6, rel=0.01)
    assert free.time_us == best.predicted.full_clock_us < 0.5 * best.time_us
    assert best.config == free.config
    small = ProductFamily(dataclasses.replace(problem, rows=64, columns=64), board, PLAIN).propose()[0]
    assert small.time_us == small.predicted.full_clock_us


def test_more_work_takes_longer() -> None:
    device = device_of((8, 0))
    config = first((8, 0), 1024, 1024, 1024)
    depths = [packed_problem(m=1024, n=1024, k=k, arithmetic="float16", out_dtype="float16") for k in (512, 1024, 4096)]
    times = [ProductFamily(problem, device, PLAIN).predict(config).time_us for problem in depths]
    assert times == sorted(times)
    assert times[0] < times[-1]


@pytest.mark.parametrize(
    ("capability", "n", "why"),
    [((8, 0), 7, "pad the operands' contiguous extents to multiples of 8"), ((9, 0), 7, "pad the operands")],
)
def test_unaligned_products_are_refused_with_a_remedy(capability: tuple[int, int], n: int, why: str) -> None:
    problem = packed_problem(m=64, n=n, k=7, arithmetic="float16", out_dtype="float16")
    family = ProductFamily(problem, device_of(capability), PLAIN)
    assert family.propose() == ()
    assert why in (family.why_none() or "")


def test_narrow_rows_take_no_bulk_copies() -> None:
    problem = packed_problem(m=512, n=512, k=516, arithmetic="float16", out_dtype="float16")
    found = ProductFamily(problem, device_of((9, 0)), PLAIN).propose()
    assert {item.config.generation for item in found} == {"2.x"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stages": 1}, "at least 2 stages"),
        ({"stages": 40}, "bytes of shared memory are more than"),
        ({"warp": (48, 64, 32)}, "not a whole number of warps"),
        ({"warp": (128, 128, 32)}, "at least two warps"),
        ({"warp": (128, 64, 32)}, "registers of a thread"),
        ({"threadblock": (128, 32, 32), "warp": (32, 16, 32)}, "do not cover"),
        ({"alignment_a": 1}, "cannot be copied asynchronously"),
        ({"alignment_b": 16}, "more than the problem's 8"),
    ],
)
def test_what_the_headers_refuse_is_refused(change: dict[str, object], why: str) -> None:
    problem = packed_problem(m=512, n=512, k=512, arithmetic="float16", out_dtype="float16")
    config = GemmConfig(
        arithmetic="float16",
        architecture=80,
        threadblock=(128, 128, 32),
        warp=(64, 64, 32),
        instruction=(16, 8, 16),
        stages=3,
        alignment_a=8,
        alignment_b=8,
        alignment_d=8,
    )
    family = ProductFamily(problem, device_of((8, 0)), PLAIN)
    assert family.why_illegal(config) is None
    refused = dataclasses.replace(config, **change)
    assert why in (family.why_illegal(refused) or "legal")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"threadblock": (64, 128, 64)}, "cooperative tiles have M in multiples of 128"),
        ({"threadblock": (128, 512, 64)}, "up to 256"),
        ({"threadblock": (256, 256, 64)}, "registers of a thread"),
        ({"threadblock": (128, 128, 32)}, "128 bytes wide along K"),
        ({"schedule": "pingpong", "split_k": 2}, "no stream-K"),
        ({"cluster": (4, 4)}, "at most 8"),
        ({"stages": 1}, "at least 2 stages"),
        ({"stages": 8}, "shared memory"),
        ({"alignment_d": 4}, "rows of D are no multiples of 16 bytes"),
    ],
)
def test_what_collectives_refuse_is_refused(change: dict[str, object], why: str) -> None:
    problem = packed_problem(m=512, n=512, k=512, arithmetic="float16", out_dtype="float16")
    config = GemmConfig(
        arithmetic="float16",
        architecture=90,
        threadblock=(128, 128, 64),
        stages=4,
        schedule="cooperative",
        alignment_a=8,
        alignment_b=8,
        alignment_d=8,
    )
    older, family = (ProductFamily(problem, device_of(capability), PLAIN) for capability in ((8, 0), (9, 0)))
    assert family.why_illegal(config) is None
    assert "has no bulk copies" in (older.why_illegal(config) or "")
    refused = dataclasses.replace(config, **change)
    assert why in (family.why_illegal(refused) or "legal")


@pytest.mark.parametrize("arithmetic", ["int8", "float8_e4m3fn"])
def test_eight_bit_operands_lie_along_k(arithmetic: str) -> None:
    device = device_of((9, 0))
    problem = packed_problem(m=512, n=512, k=512, arithmetic=arithmetic, layout_b="row", out_dtype="float16")
    family = ProductFamily(problem, device, PLAIN)
    assert family.propose() == ()
    assert "must lie along K" in (family.why_none() or "")


@pytest.mark.parametrize("name", ["nvidia-v100", "nvidia-k80"])
def test_devices_without_templates_are_refused(name: str) -> None:
    problem = packed_problem(m=512, n=512, k=512, arithmetic="float16", out_dtype="float16")
    with pytest.raises(TargetError, match=r"begin with CUDA's compute capability 7\.5"):
        ProductFamily(problem, device_db.lookup(name), PLAIN)


@pytest.mark.parametrize("extents", [(0, 8, 8), (8, -1, 8), (8, 8, 2**31)])
def test_sizes_are_positive_and_fit_32_bits(extents: tuple[int, int, int]) -> None:
    m, n, k = extents
    with pytest.raises(InputError, match="a matrix product of M, N, K"):
        packed_problem(m=m, n=n, k=k, arithmetic="float16", out_dtype="float16")


@pytest.mark.parametrize(("arithmetic", "out"), [("float64", "float64"), ("float16", "float64"), ("int4", "int8")])
def test_unknown_types_are_refused(arithmetic: str, out: str) -> None:
    def family() -> ProductFamily:
        problem = packed_problem(m=8, n=8, k=8, arithmetic=arithmetic, out_dtype=out)
        return ProductFamily(problem, device_of((8, 0)), Epilogue(out_dtype=out))

    with pytest.raises(InputError, match="CUTLASS templates"):
        family()


@given(st.integers(1, 10**6), st.sampled_from((8, 16, 32)))
def test_the_widest_access_divides_rows(extent: int, bits: int) -> None:
    width = widest_access(extent, bits)
    assert extent % width == 0
    assert width * bits <= ACCESS_BITS
    assert width * bits == ACCESS_BITS or extent % (2 * width) != 0


def test_a_configuration_goes_through_json_and_names_what_is_compiled_in() -> None:
    problem = packed_problem(m=512, n=512, k=512, arithmetic="float16", out_dtype="float16")
    found = list(ProductFamily(problem, device_of((9, 0)), PLAIN).candidates())
    assert all(from_json(GemmConfig, to_json(config)) == config for config in found[::97])
    run_time = [dataclasses.replace(config, swizzle=1, raster="along_m") for config in found if config.schedule]
    assert len({config.name for config in run_time}) == len(set(run_time))


def test_a_row_without_a_peak_is_refused_by_name() -> None:
    row = device_of((8, 0))
    bare = dataclasses.replace(row, peak_gflops=(("float32", 1.0),))
    problem = packed_problem(m=512, n=512, k=512, arithmetic="float16", out_dtype="float16")
    with pytest.raises(TargetError, match="does not say how fast it multiplies float16"):
        ProductFamily(problem, bare, PLAIN).propose()


@pytest.mark.parametrize("name", ["nvidia-t4", "nvidia-a100", "nvidia-h200"])
def test_a_profiler_of_eight_attempts_sees_eight_tiles(name):
    problem = packed_problem(m=1280, n=3072, k=768, arithmetic="float16", out_dtype="float16")
    found = ProductFamily(problem, device_db.lookup(name), PLAIN).propose()
    assert len({item.config.threadblock[:2] for item in found[:8]}) == 8
    assert len(found) > len({item.config.threadblock[:2] for item in found})  # and the second of a tile comes after
