"""Which templates a region may have: its candidates, best first, each with its source and its launch.

This is where the kinds of problems meet. A matrix product's candidates are made of `configs` and `emit`, a
convolution's (`CutlassProblem.window`) of `convolution_configs` and `emit_convolution`; both give a name, a predicted
time, a text, and a `KernelCall`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tvm_ext.devices.capabilities import BULK_COPIES_SINCE, capability_text, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, InputError, TargetError
from tvm_ext.records.partition import CutlassRegion, operand_name, parameter_of
from tvm_ext.records.serialise import to_json

from . import emit, emit_back_to_back, emit_convolution
from .back_to_back import PairConfig, PairProblem, propose_pair
from .configs import propose, runtime_variants, why_none
from .convolution import AnyConvolutionConfig, ConvolutionConfig, ConvolutionProblem, plain_tile
from .convolution_configs import propose_convolution, runtime_convolution_variants, why_no_convolution
from .convolution_ranking import convolution_time_us
from .epilogue import Epilogue
from .gemm import GemmConfig, GemmProblem
from .host import KernelCall
from .ranking import predicted_time_us

RegionKey = TypeVar("RegionKey")

LOOKED_AT = 48
"""Templates of a region among which a shared one is looked for."""

SHARING_TOLERANCE = 1.05
"""So much longer than its fastest template may a region's take, if other regions have it as well: a kernel less to
compile is ten seconds, and no model is right to a twentieth."""

MOST_CANDIDATES = 4
"""Templates of a region that are tried, one after another, where the compiler refuses those before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A template for a region: ``source`` writes the text of its kernel, ``architecture`` is what compiles it."""

    name: str
    time_us: float  # predicted
    architecture: str
    source: Callable[[], str]
    call: KernelCall
    configuration: str = ""  # all of it, what is an argument at run time too, as JSON
    variants: Callable[[], tuple[Candidate, ...]] = tuple  # the same program with other arguments
    measured_us: float | None = None

    @property
    def known_us(self) -> float:
        """Measured, or predicted where it is not."""
        return self.time_us if self.measured_us is None else self.measured_us


def candidates_of(region: CutlassRegion, device: DeviceSpec, count: int = LOOKED_AT) -> tuple[Candidate, ...]:
    """The best ``count`` templates for ``region`` on ``device``; raises IllegalRewrite, saying why, where none is."""
    if not region.expression:
        raise IllegalRewrite(f"{region.pattern}: epilogues have no visitor for {region.epilogue[-1].function}", "")
    make = _gemm_candidates if region.problem.window is None else _convolution_candidates
    make = make if region.then is None else _pair_candidates
    try:
        return make(region, device, count)
    except (InputError, TargetError) as error:
        raise IllegalRewrite(f"{region.pattern}: {error.problem}", error.remedy) from error


def share_templates(found: Mapping[RegionKey, Sequence[Candidate]]) -> dict[RegionKey, tuple[Candidate, ...]]:
    """The candidates of each region to try, first one of few templates that serve all regions nearly as fast.

    Again and again the template that serves most of the regions without one; of equals, the fastest.
    """
    near = {
        region: {item.call.symbol: item for item in items if item.known_us <= items[0].known_us * SHARING_TOLERANCE}
        for region, items in found.items()
    }
    first: dict[RegionKey, Candidate] = {}
    while len(first) < len(found):
        served: dict[str, list[float]] = {}
        for region in found.keys() - first.keys():
            for symbol, item in near[region].items():
                served.setdefault(symbol, []).append(item.known_us / found[region][0].known_us)
        best = min(served, key=lambda symbol: (-len(served[symbol]), sum(served[symbol]), symbol))
        first |= {region: items[best] for region, items in near.items() if region not in first and best in items}
    return {region: _behind(first[region], items) for region, items in found.items()}


def _behind(first: Candidate, items: Sequence[Candidate]) -> tuple[Candidate, ...]:
    others = [item for item in items if item.call.symbol != first.call.symbol]
    return (first, *others)[:MOST_CANDIDATES]


def architecture_of(device: DeviceSpec) -> str:
    """What the kernel is compiled for: the device's own machine code, with what only it has."""
    return f"sm_{capability_text(device).replace('.', '')}" + ("a" if has(device, BULK_COPIES_SINCE) else "")


def _gemm_candidates(region: CutlassRegion, device: DeviceSpec, count: int) -> tuple[Candidate, ...]:
    problem = GemmProblem.of(region.problem, region.out_dtype)
    epilogue, places = shared_epilogue(region)
    ranked = propose(problem, device, epilogue, count=count)
    if not ranked:
        raise IllegalRewrite(f"{region.pattern}: {why_none(problem, device, epilogue)}", "")
    return tuple(_gemm_candidate(item.config, problem, device, epilogue, region, places) for item in ranked)


def _gemm_candidate(
    config: GemmConfig,
    problem: GemmProblem,
    device: DeviceSpec,
    epilogue: Epilogue,
    region: CutlassRegion,
    places: tuple[int, ...],
) -> Candidate:
    def variants() -> tuple[Candidate, ...]:
        others = runtime_variants(config, problem)
        return tuple(_gemm_candidate(item, problem, device, epilogue, region, places) for item in others)

    return Candidate(
        name=config.name,
        time_us=predicted_time_us(config, problem, device, epilogue),
        architecture=architecture_of(device),
        source=_source(config, epilogue, problem),
        call=gemm_call(config, epilogue, problem, region, places),
        configuration=to_json(config),
        variants=variants,
    )


def _convolution_candidates(region: CutlassRegion, device: DeviceSpec, count: int) -> tuple[Candidate, ...]:
    problem = ConvolutionProblem.of(region.problem, region.out_dtype)
    epilogue, places = shared_epilogue(region)
    ranked = propose_convolution(problem, device, epilogue, count=count)
    if not ranked:
        raise IllegalRewrite(f"{region.pattern}: {why_no_convolution(problem, device, epilogue)}", "")
    return tuple(_convolution_candidate(item.config, problem, device, epilogue, region, places) for item in ranked)


def _convolution_candidate(
    config: AnyConvolutionConfig,
    problem: ConvolutionProblem,
    device: DeviceSpec,
    epilogue: Epilogue,
    region: CutlassRegion,
    places: tuple[int, ...],
) -> Candidate:
    tile = plain_tile(config)
    if tile is None:
        source = _convolution_source(config, epilogue)
        call = convolution_call(config, epilogue, problem, region, places)
    else:  # the very kernel of a matrix product, which others in the model may share
        source = _source(tile, epilogue, problem.product())
        call = gemm_call(tile, epilogue, problem.product(), region, places)

    def variants() -> tuple[Candidate, ...]:
        others = runtime_convolution_variants(config, problem, device, epilogue)
        return tuple(_convolution_candidate(item, problem, device, epilogue, region, places) for item in others)

    return Candidate(
        name=config.name,
        time_us=convolution_time_us(config, problem, device, epilogue),
        architecture=architecture_of(device),
        source=source,
        call=call,
        configuration=to_json(config),
        variants=variants,
    )


def _pair_candidates(region: CutlassRegion, device: DeviceSpec, count: int) -> tuple[Candidate, ...]:
    assert region.then is not None
    problem = PairProblem.of(region)
    (first, places), (second, more) = shared_epilogue(region), shared_epilogue(region.then)
    ranked = propose_pair(problem, device, first, second, count)
    return tuple(
        Candidate(
            name=item.config.name,
            time_us=item.time_us,
            architecture=architecture_of(device),
            source=_pair_source(item.config, first, second, problem),
            call=pair_call(item.config, first, second, problem, region, (*places, *more)),
        )
        for item in ranked
    )


def _pair_source(config: PairConfig, first: Epilogue, second: Epilogue, problem: PairProblem) -> Callable[[], str]:
    return lambda: emit_back_to_back.emit_pair(config, first, second, layout_b=problem.first.b.order)


def shared_epilogue(region: CutlassRegion) -> tuple[Epilogue, tuple[int, ...]]:
    """The region's epilogue in a form that regions of one kind share, and its operands' places among the parameters.

    Operands are named in their order, and of a batch's distances only counts whether there is one.
    """
    new = {operand.name: operand_name(index) for index, operand in enumerate(region.operands)}
    expression = re.sub(r"\boperand\d+\b", lambda match: new[match[0]], region.expression)
    operands = tuple(
        dataclasses.replace(operand, name=new[operand.name], batch_stride=min(1, operand.batch_stride))
        for operand in region.operands
    )
    places = tuple(parameter_of(operand.name) for operand in region.operands)
    return Epilogue(expression=expression, operands=operands, out_dtype=region.out_dtype), places


def gemm_call(
    config: GemmConfig, epilogue: Epilogue, problem: GemmProblem, region: CutlassRegion, places: tuple[int, ...]
) -> KernelCall:
    """The launch of ``config`` for the region's own extents and distances."""
    a, b = problem.a, problem.b
    first, second = region.factors
    numbers = (
        problem.m, problem.n, problem.k, problem.batch, a.leading_dimension, b.leading_dimension,
        a.batch_stride, b.batch_stride, problem.m * problem.n if problem.batch > 1 else 0,
        config.split_k, config.swizzle, int(config.raster == "along_m"), 0,
    )  # fmt: skip
    pointers = f"data[{first}], data[{second}], operands, distances, data[tensors - 1]"
    return KernelCall(
        symbol=emit.symbol_of(config, epilogue, a.order, b.order, batched=problem.batch > 1),
        structure="GemmCall",
        declaration=emit.CALL,
        fields=f"{', '.join(map(str, numbers))}, {pointers}",
        numbers=numbers,
        operands=places,
        distances=tuple(operand.batch_stride for operand in region.operands),
    )


def _source(config: GemmConfig, epilogue: Epilogue, problem: GemmProblem) -> Callable[[], str]:
    return lambda: emit.emit_gemm(
        config, epilogue, layout_a=problem.a.order, layout_b=problem.b.order, batched=problem.batch > 1
    )


def _convolution_source(config: AnyConvolutionConfig, epilogue: Epilogue) -> Callable[[], str]:
    return lambda: emit_convolution.emit_convolution(config, epilogue)


def convolution_call(
    config: AnyConvolutionConfig,
    epilogue: Epilogue,
    problem: ConvolutionProblem,
    region: CutlassRegion,
    places: tuple[int, ...],
) -> KernelCall:
    """The launch of ``config`` for the region's own extents."""
    window, tuning = problem.window, (config.split, 1, 0, 0)
    if isinstance(config, ConvolutionConfig):
        tuning = (config.split, config.tile.swizzle, int(config.tile.raster == "along_m"), 0)
    numbers = (
        *window.input_extents, problem.filters, *window.filter_extents, *window.output_extents,
        *window.padding, *window.strides, *window.dilation, window.groups, *tuning,
    )  # fmt: skip
    first, second = region.factors
    return KernelCall(
        symbol=emit_convolution.symbol_of(config, epilogue),
        structure="ConvolutionCall",
        declaration=emit_convolution.CALL,
        fields=f"{', '.join(map(str, numbers))}, data[{first}], data[{second}], operands, data[tensors - 1]",
        numbers=numbers,
        operands=places,
    )


def pair_call(
    config: PairConfig,
    first: Epilogue,
    second: Epilogue,
    problem: PairProblem,
    region: CutlassRegion,
    places: tuple[int, ...],
) -> KernelCall:
    """The launch of ``config`` for the region's own extents; of matrix products the window is zeros."""
    assert region.then is not None
    head, tail = problem.first, problem.second
    window: tuple[int, ...] = (0,) * 14
    if problem.convolution is not None:
        own = problem.convolution.window
        window = (
            *own.input_extents, *own.filter_extents, *own.output_extents, *own.padding, *own.strides, *own.dilation
        )  # fmt: skip
    numbers = (
        head.m, head.n, head.k, tail.n, head.a.leading_dimension, head.b.leading_dimension, tail.b.leading_dimension,
        *window,
    )  # fmt: skip
    factors = ", ".join(f"data[{place}]" for place in (*region.factors, region.then.factors[1]))
    return KernelCall(
        symbol=emit_back_to_back.symbol_of(config, first, second, head.b.order),
        structure="PairCall",
        declaration=emit_back_to_back.CALL,
        fields=f"{', '.join(map(str, numbers))}, {factors}, operands, data[tensors - 1]",
        operands=places,
    )
