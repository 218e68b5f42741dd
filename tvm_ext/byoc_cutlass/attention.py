"""Attention by CUTLASS's examples 41 and 88: both products and the softmax between them in one kernel.

A threadblock has a tile of queries and goes over the keys: scores stay in shared memory, sums of values in registers
where the features of a value fit one tile, else in a buffer of float32. Example 88, of sm_90a, has bulk copies, and two
warp groups that each multiply 64 queries by wgmma and keep scores and sums in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tvm_ext.devices.capabilities import ASYNC_COPIES_SINCE, BULK_COPIES_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite, TargetError
from tvm_ext.records.attention import Attention, MatrixOperand
from tvm_ext.records.partition import (
    ACCUMULATOR,
    CutlassProblem,
    CutlassRegion,
    EpilogueOperand,
    MatrixLayout,
    Order,
    operand_name,
)
from tvm_ext.support.arithmetic import ceil_div

from . import emit_attention
from .epilogue import Epilogue
from .family import PredictedTime, TemplateFamily, check_device
from .host import KernelCall
from .ranking import BUSY_WARPS, global_gb_per_s

WIDE, NARROW = 8, 4
"""Halves that a copy takes: the template's two widths."""

MOST_HEADS = 65535
"""Extents of a grid behind its first (CUDA)."""

_TILES = ((64, 64, 64), (32, 128, 128), (64, 128, 128), (32, 128, 65536), (64, 128, 65536))
"""Queries and keys of a threadblock, and the most features: what example 41 and xFormers compile."""

_WARPS_OF_UNIT = {75: 12, 80: 16, 90: 8}
"""By the template's architecture: what `kernel_forward.h` asks the compiler's registers for (getWarpsPerSmFw); of
example 88 the two warp groups that multiply, for one threadblock has a unit's registers."""

_SOFTMAX_STEPS = 5
"""Instructions a score takes beside its power: the scale, the maximum, the difference, the sum, the conversion."""
_MASK_STEPS = 3
"""And where there is a mask: half a load, half its address, the conversion, the sum with the scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """A template's parameters: ``queries`` and ``keys`` of a threadblock, the ``most_features`` that it serves."""

    architecture: int
    queries: int
    keys: int
    most_features: int
    wide: bool
    biased: bool

    @property
    def name(self) -> str:
        """A name of the template in C: whatever is compiled in, and nothing else."""
        tile = f"{self.queries}x{self.keys}x{self.most_features}"
        return (
            f"attention_sm{self.architecture}_{tile}_a{WIDE if self.wide else NARROW}{'_biased' if self.biased else ''}"
        )

    @property
    def is_collective(self) -> bool:
        """Whether it is example 88's."""
        return self.architecture >= 90

    @property
    def warps(self) -> int:
        """Those that multiply."""
        return self.queries // 16 if self.is_collective else self.queries * self.keys // 1024

    @property
    def in_registers(self) -> bool:
        """Whether the sums of values are, throughout."""
        return self.is_collective or self.most_features <= self.keys


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadStrides:
    """Where an operand begins, and its distances from row to row, head to head and batch to batch, in elements."""

    offset: int
    row: int
    head: int
    batch: int

    @property
    def alignment(self) -> int:
        """The largest power of two that divides all, at most `WIDE`."""
        return next(size for size in (WIDE, NARROW, 2, 1) if not any(number % size for number in self.numbers))

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        return self.offset, self.row, self.head, self.batch


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayout:
    """An attention as the template reads it: ``batches`` times ``heads``; the output is a row of all heads a query."""

    batches: int
    heads: int
    query: HeadStrides
    key: HeadStrides
    value: HeadStrides
    bias: HeadStrides | None
    output_row: int


def layout_of(work: Attention) -> AttentionLayout:
    """How the template is told where the operands of ``work`` lie; raises IllegalRewrite where it cannot be."""
    _check_types(work)
    heads, rest = divmod(work.output.row_stride, work.value_features)
    batches = work.batch // heads if heads else 0
    row = work.output.row_stride
    head, batch = work.value_features if heads > 1 else 0, work.queries * row if batches > 1 else 0
    written = HeadStrides(offset=0, row=row, head=head, batch=batch)
    if rest or batches * heads != work.batch or _strides(work.output, batches, heads) != written:
        raise IllegalRewrite(
            "its result is not written query by query with all heads of one together, nor head by head"
        )
    if max(heads, batches) > MOST_HEADS:
        raise IllegalRewrite(f"it has {max(heads, batches)} heads or batches, and a grid {MOST_HEADS}")
    names = ("queries", "keys", "values")
    query, key, value = (
        _contiguous(name, operand, batches, heads)
        for name, operand in zip(names, (work.query, work.key, work.value), strict=True)
    )
    bias = None
    if work.terms:
        bias = _contiguous("mask", work.terms[0].operand, batches, heads)
        if bias.alignment < WIDE or work.keys % WIDE:
            raise IllegalRewrite(
                f"{work.keys} keys and a mask with rows {bias.row} apart are no multiples of {WIDE}: pad them"
            )
    return AttentionLayout(batches=batches, heads=heads, query=query, key=key, value=value, bias=bias, output_row=row)


def _check_types(work: Attention) -> None:
    types = {operand.dtype for operand in (work.query, work.key, work.value, work.output)}
    if types != {"float16"}:
        raise IllegalRewrite(
            f"the template takes float16, not {', '.join(sorted(types))}: of float32 it multiplies parts in tfloat32"
        )
    if work.cleared is not None or len(work.terms) > 1:
        raise IllegalRewrite("the template adds one tensor to the scores, and changes no others and no probabilities")
    for term in work.terms:
        if term.change != "add" or term.scale != 1.0 or term.operand.dtype != "float16":
            raise IllegalRewrite("the template adds a tensor of float16 to the scores, unscaled, and chooses none")
    if work.features % NARROW or work.value_features % NARROW:
        raise IllegalRewrite(
            f"{work.features} and {work.value_features} features are no multiples of {NARROW}: pad them"
        )


def _contiguous(name: str, operand: MatrixOperand, batches: int, heads: int) -> HeadStrides:
    """Of an operand whose rows' elements lie together."""
    found = _strides(operand, batches, heads)
    if operand.column_stride != 1 or found is None:
        raise IllegalRewrite(f"the {name} are no rows of contiguous elements at even distances for batches and heads")
    if found.alignment < NARROW:
        raise IllegalRewrite(f"the {name} begin or go on at no multiples of {NARROW} elements")
    return found


def _strides(operand: MatrixOperand, batches: int, heads: int) -> HeadStrides | None:
    """None where the digits of the batch are no two even distances. Twelve heads, three of which share one of keys, are
    none: 0, 0, 0, 64, 64, ...
    """
    places = np.zeros(1, "int64")
    for extent, stride in operand.batch:
        places = (places[:, None] + np.arange(extent) * stride).reshape(-1)
    grid = places.reshape(batches, heads)
    batch = int(grid[1, 0] - grid[0, 0]) if batches > 1 else 0
    head = int(grid[0, 1] - grid[0, 0]) if heads > 1 else 0
    if not np.array_equal(grid, np.arange(batches)[:, None] * batch + np.arange(heads) * head):
        return None
    return HeadStrides(offset=operand.offset, row=operand.row_stride, head=head, batch=batch)


def attention_region(work: Attention, value: str, parameters: tuple[int, ...], device: DeviceSpec) -> CutlassRegion:
    """The region of an attention that makes ``value`` of the function's ``parameters``, query, key, value and mask.

    Raises IllegalRewrite, with the reason, where no template serves it on ``device``.
    """
    layout = layout_of(work)
    check_device(device)
    dtype = work.output.dtype
    bias = parameters[3:]
    return CutlassRegion(
        value=value,
        pattern="attention",
        problem=CutlassProblem(
            anchor="batched_matmul",
            batch=work.batch,
            rows=work.queries,
            columns=work.keys,
            depth=work.features,
            dtypes=(dtype, dtype, dtype),
            operands=(_matrix(layout.query, "row"), _matrix(layout.key, "column")),
            simt=False,
        ),
        epilogue=(),
        factors=(parameters[0], parameters[1]),
        expression=" + ".join([ACCUMULATOR, *map(operand_name, bias)]),
        operands=tuple(EpilogueOperand(name=operand_name(place), role="matrix", dtype=dtype) for place in bias),
        out_dtype=dtype,
        ended="the template has no epilogue",
        saved_us=0.0,
        attention=work,
        values=parameters[2],
    )


def _matrix(strides: HeadStrides, order: Order) -> MatrixLayout:
    return MatrixLayout(
        order=order, leading_dimension=strides.row, batch_stride=strides.head, alignment=strides.alignment
    )


class AttentionFamily(TemplateFamily[AttentionConfig]):
    """Templates for ``work`` on ``device``; raises IllegalRewrite as `layout_of`."""

    form = emit_attention.ATTENTION_CALL
    does = "attends in"

    def __init__(self, problem: CutlassProblem, device: DeviceSpec, epilogue: Epilogue, *, work: Attention) -> None:
        super().__init__(problem, device, epilogue)
        self.work, self.layout = work, layout_of(work)
        self.architecture = 80 if has(device, ASYNC_COPIES_SINCE) else 75  # of the templates that the device runs

    @property
    def features(self) -> int:
        return max(self.work.features, self.work.value_features)

    def candidates(self) -> Iterator[AttentionConfig]:
        layout = self.layout
        read = (layout.query, layout.key, layout.value)
        whole = not (self.work.features % WIDE or self.work.value_features % WIDE)
        wide = whole and all(strides.alignment == WIDE for strides in read)
        biased = layout.bias is not None
        for queries, keys, most in _TILES:
            yield AttentionConfig(
                architecture=self.architecture, queries=queries, keys=keys, most_features=most, wide=wide,
                biased=biased,
            )  # fmt: skip
        if has(self.device, BULK_COPIES_SINCE):
            for queries, keys, most in emit_attention.HOPPER_TILES:
                yield AttentionConfig(
                    architecture=90, queries=queries, keys=keys, most_features=most, wide=True, biased=biased
                )

    def reasons(self, config: AttentionConfig) -> Iterator[str | None]:
        yield (
            f"{self.features} features are more than its {config.most_features}"
            if self.features > config.most_features
            else None
        )
        # Two tiles of 64 x 128 do not fit the shared memory of a Turing.
        too_large = self.architecture < 80 and config.queries * config.keys > 64 * 64
        yield f"a tile of {config.queries} x {config.keys} has no room on {self.device.name}" if too_large else None
        yield "a mask is read in copies of 8 halves" if config.biased and not config.wide else None
        yield self._why_no_collective() if config.is_collective else None

    def _why_no_collective(self) -> str | None:
        """fmha_collective_tma_warpspecialized.hpp, can_implement; what bulk copies read; the softmax."""
        work, layout = self.work, self.layout
        if work.value_features != work.features or work.features % WIDE or work.queries % WIDE:
            return f"example 88 takes queries and features, as many of a value as of a key, in multiples of {WIDE}"
        if work.scale <= 0 and not work.terms:
            return "example 88 takes scores' largest before it scales them, by a positive number"
        if any(not self._is_bulk(strides) for strides in (layout.query, layout.key, layout.value)):
            return "bulk copies read rows at multiples of 16 bytes, and no row for several heads or batches"
        return None

    def _is_bulk(self, strides: HeadStrides) -> bool:
        counts = (self.layout.heads, self.layout.batches)
        distances = zip(counts, (strides.head, strides.batch), strict=True)
        return strides.alignment == WIDE and all(count == 1 or distance > 0 for count, distance in distances)

    def predict(self, config: AttentionConfig) -> PredictedTime:
        """A tile of scores is multiplied, changed and multiplied again, one after another in a threadblock; others of
        the unit fill what it leaves. Each tile of the sums that are no registers goes to memory and back once a step.
        """
        work, device = self.work, self.device
        machine, units = Machine(device), device.unit_count
        blocks = work.batch * ceil_div(work.queries, config.queries)
        steps = ceil_div(work.keys, config.keys)
        tile = config.queries * config.keys
        peak = device.peak_gflops_of if config.is_collective else device.emitted_gflops_of
        gflops = peak("float16_tensor")
        if not gflops:
            problem = f"the device table of {device.name} does not say how fast it multiplies float16."
            raise TargetError(problem, "give its row peak_gflops of float16_tensor")
        resident = max(1, _WARPS_OF_UNIT[config.architecture] // config.warps)
        held = ceil_div(blocks, units)
        busy = min(1.0, min(held, resident) * config.warps / BUSY_WARPS)
        depth = ceil_div(work.features, 32) * 32 + ceil_div(work.value_features, 32) * 32
        depth = 2 * config.most_features if config.is_collective else depth
        multiply_us = 2.0 * tile * depth / (gflops / units * busy * 1e3)
        vector = _SOFTMAX_STEPS + machine.instructions("exp")
        vector += _MASK_STEPS if config.biased else 0
        soften_us = tile * vector / (machine.results_per_s("float32") / units * busy / 1e6)
        spilled = 0 if config.in_registers else 8.0 * config.queries * work.value_features
        rate = global_gb_per_s(device) * 1e3
        units_us = held * steps * (multiply_us + soften_us) + blocks * steps * spilled / rate
        moved = sum(operand.size for operand in work.operands) * 2.0
        moved += 4.0 * work.batch * work.queries if config.is_collective else 0.0  # logarithms of sums
        busy_us = max(units_us, moved / rate)
        power_us = device.least_multiplying_s(2.0 * blocks * steps * tile * depth, "float16_tensor") * 1e6
        launch_us = machine.launch_us
        return PredictedTime(time_us=max(busy_us, power_us) + launch_us, full_clock_us=busy_us + launch_us)

    def preference(self, config: AttentionConfig) -> tuple[int, int]:
        return config.most_features, config.warps

    def source(self, config: AttentionConfig) -> str:
        return emit_attention.emit_attention(
            self.symbol(config), config.name,
            architecture=config.architecture, tile=(config.queries, config.keys, config.most_features),
            wide=config.wide, biased=config.biased,
        )  # fmt: skip

    def numbers(self, config: AttentionConfig) -> tuple[int, ...]:
        del config
        work, layout = self.work, self.layout
        bias = layout.bias or HeadStrides(offset=0, row=0, head=0, batch=0)
        strides = (item.numbers for item in (layout.query, layout.key, layout.value, bias))
        return (
            *(number for numbers in strides for number in numbers),
            layout.batches, layout.heads, work.queries, work.keys, work.features, work.value_features,
            layout.output_row, int(np.float32(work.scale).view("int32")),
        )  # fmt: skip

    def call(self, config: AttentionConfig, region: CutlassRegion) -> KernelCall:
        factors = (*region.factors, region.values)
        return replace(super().call(config, region), factors=factors)
