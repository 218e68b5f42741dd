"""Properties of tiles, padding and construction over random shapes, primes and ones among them."""

from __future__ import annotations

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._ablated import construct_ablated
from tests.support.alignment_facts import alignment_facts
from tests.support.tensor_exprs import conv2d, depthwise_conv2d, elementwise, matmul, pool2d, reduce_sum
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices import device_db
from tvm_ext.tir_passes.roller.align import ALL_RULES, next_shape_aligned, padding_waste
from tvm_ext.tir_passes.roller.canonical import canonicalise
from tvm_ext.tir_passes.roller.construct import construct
from tvm_ext.tir_passes.roller.rtile import bank_padding, conflict_degree

extent = st.one_of(st.sampled_from([1, 2, 3, 5, 7, 13, 16, 17, 31, 64, 83, 97, 128]), st.integers(1, 200))
small = st.integers(1, 12)
window = st.sampled_from([(1, 1), (3, 3), (1, 5), (7, 7)])
expressions = st.one_of(
    st.builds(matmul, extent, extent, extent, constant=st.booleans(), transpose_b=st.booleans()),
    st.builds(matmul, extent, extent, extent, st.sampled_from(["float16", "int32"])),
    st.builds(conv2d, small, extent, small, small, extent, window, st.integers(1, 2), constant=st.booleans()),
    st.builds(depthwise_conv2d, small, extent, small, small, window, st.integers(1, 2)),
    st.builds(pool2d, small, extent, small, small, window, st.integers(1, 2)),
    st.builds(elementwise, extent, small, extent),
    st.builds(reduce_sum, extent, extent),
)
devices = st.sampled_from(
    ["cpu-avx512", "cpu-avx2", "cpu-neon", "nvidia-v100", "nvidia-t4", "amd-mi50", "graphcore-ipu"]
)


@given(
    row=st.integers(1, 300),
    read=st.integers(1, 32),
    banks=st.sampled_from([4, 16, 32]),
    width=st.sampled_from([1, 2, 4]),
)
def test_padded_rows_are_read_without_conflicts(row: int, read: int, banks: int, width: int):
    """The words that one access of all banks reads, row after row, all lie in different banks."""
    words = -(-read // width)
    row = row * width  # rows are stored in whole words
    stride = row + bank_padding(row, read, banks, width)
    rows = max(1, banks // words)
    used = [(r * stride // width + word) % banks for r in range(rows) for word in range(min(words, banks))]
    assert len(set(used)) == len(used)


@given(
    row=st.integers(1, 300), read=st.integers(1, 32), banks=st.sampled_from([4, 16, 32]), width=st.sampled_from([1, 2])
)
def test_padding_is_less_than_one_turn_of_the_banks_and_never_worse(row: int, read: int, banks: int, width: int):
    padding = bank_padding(row, read, banks, width)
    assert 0 <= padding < banks * width
    rows = max(1, banks // -(-read // width))
    assert conflict_degree(row + padding, read, rows, banks, width) <= max(
        2, conflict_degree(row, read, rows, banks, width)
    )


@given(
    extent=st.integers(1, 5000),
    size=st.integers(1, 6000),
    step=st.integers(1, 64),
    epsilon=st.sampled_from([0, 0.1, 0.4, 1.0]),
)
def test_aligned_sizes_waste_no_more_than_epsilon_and_none_is_skipped(
    extent: int, size: int, step: int, epsilon: float
):
    whole = -(-extent // step) * step
    first = -(-size // step) * step
    found = next_shape_aligned(extent, first, step, epsilon)
    candidates = [s for s in range(first, whole, step) if padding_waste(extent, s) <= epsilon]
    expected = candidates[0] if candidates else (whole if first <= whole else None)
    assert found == expected


@settings(max_examples=60, deadline=None)
@given(expr=expressions, device=devices, fuse=st.booleans())
def test_programs_exist_fit_and_cover(expr, device, fuse):  # type: ignore[no-untyped-def]
    spec = device_db.lookup(device)
    construction = construct(canonicalise(expr, fuse=fuse).expr, spec, k=2)
    assert construction.programs, "every operator has a program on every device"
    canonical = construction.canonical.expr
    for program in construction.programs:
        facts = alignment_facts(canonical, program, spec)
        assert facts["capacity"] is not False
        assert facts["unit"] is not False
        block = dict(program.tiles)[
            spec.layers[PerfModel(canonical, spec, program.vector_axis).partition_level].name
        ].sizes
        covered = prod(-(-axis.extent // block[axis.name]) * block[axis.name] for axis in canonical.spatial)
        assert covered >= prod(axis.extent for axis in canonical.spatial)
        assert program.partition_count == prod(-(-axis.extent // block[axis.name]) for axis in canonical.spatial)


@settings(max_examples=60, deadline=None)
@given(expr=expressions)
def test_axis_fusion_keeps_the_computation(expr):  # type: ignore[no-untyped-def]
    form = canonicalise(expr)
    assert form.expr.point_count == expr.point_count
    assert [prod(access.shape) for access in form.expr.accesses] == [prod(access.shape) for access in expr.accesses]
    originals = [axis for _, group in form.groups for axis in group]
    assert sorted([*originals, *form.dropped]) == sorted(axis.name for axis in expr.axes)
    for axis, group in form.groups:
        assert form.expr.axis(axis).extent == prod(expr.axis(name).extent for name in group)
        for before, after in zip(expr.accesses, form.expr.accesses, strict=True):
            assert after.stride(axis) == before.stride(group[-1])


@settings(max_examples=40, deadline=None)
@given(expr=expressions)
def test_larger_register_tiles_never_load_more(expr):  # type: ignore[no-untyped-def]
    """Doubling one spatial axis from a single point cannot raise the traffic into a thread's registers."""
    model = PerfModel(expr, device_db.lookup("nvidia-v100"))
    one = (1,) * len(model.extents)
    for axis in model.spatial:
        if model.extents[axis] % 2 == 0:
            larger = (*one[:axis], 2, *one[axis + 1 :])
            assert model.traffic_bytes(0, larger) <= model.traffic_bytes(0, one)


@settings(max_examples=20, deadline=None)
@given(expr=expressions, dropped=st.sampled_from(sorted(ALL_RULES)))
def test_any_rule_may_be_switched_off(expr, dropped):  # type: ignore[no-untyped-def]
    assert construct_ablated(expr, device_db.lookup("nvidia-v100"), k=1, rules=ALL_RULES - {dropped}).programs
