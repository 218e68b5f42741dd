"""Templates of each kind of region: what is proposed for it, and the text and the launch of a configuration.

Matrix products have `configs` and `emit`, convolutions (`CutlassProblem.window`) `convolution_configs` and
`emit_convolution`, two products in one kernel (`CutlassRegion.then`) `back_to_back` and `emit_back_to_back`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.partition import CutlassRegion, operand_name, parameter_of

from . import configs, convolution_configs, emit, emit_back_to_back, emit_convolution
from .back_to_back import PairConfig, PairProblem, predict_pair
from .convolution import AnyConvolutionConfig, ConvolutionProblem, plain_tile
from .convolution_ranking import predict_convolution
from .epilogue import Epilogue
from .gemm import GemmConfig, GemmProblem
from .host import KernelCall
from .launches import convolution_call, gemm_call, pair_call
from .pair_configs import propose_pair
from .ranking import AnyConfig, Ranked, predict_product


class RegionTemplates(Protocol[AnyConfig]):
    """The templates of one region on one device. What it raises is what `selection.candidates_of` says."""

    def propose(self, count: int) -> Sequence[Ranked[AnyConfig]]:
        """The best ``count`` legal configurations; empty where there is none."""

    def why_none(self) -> str | None:
        """Why there is none."""

    def name(self, config: AnyConfig) -> str:
        """The template's."""

    def time_us(self, config: AnyConfig) -> float:
        """Predicted, of one launch."""

    def source(self, config: AnyConfig) -> str:
        """The text of the kernel."""

    def call(self, config: AnyConfig) -> KernelCall:
        """The launch, with the region's own extents and distances."""

    def variants(self, config: AnyConfig) -> Iterable[AnyConfig]:
        """Other values of what the same program takes at run time."""


def templates_of(region: CutlassRegion, device: DeviceSpec) -> RegionTemplates[Any]:
    """Those of the region's kind; raises InputError, TargetError, IllegalRewrite for what no template of it reads."""
    if region.then is not None:
        return _Pairs(region=region, device=device, problem=PairProblem.of(region))
    if region.problem.window is not None:
        return _Convolutions(
            region=region, device=device, problem=ConvolutionProblem.of(region.problem, region.out_dtype)
        )
    return _Products(region=region, device=device, problem=GemmProblem.of(region.problem, region.out_dtype))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Products:
    region: CutlassRegion
    device: DeviceSpec
    problem: GemmProblem

    def propose(self, count: int) -> Sequence[Ranked[GemmConfig]]:
        return configs.propose(self.problem, self.device, self._epilogue, count=count)

    def why_none(self) -> str | None:
        return configs.why_none(self.problem, self.device, self._epilogue)

    def name(self, config: GemmConfig) -> str:
        return config.name

    def time_us(self, config: GemmConfig) -> float:
        return predict_product(config, self.problem, self.device, self._epilogue).time_us

    def source(self, config: GemmConfig) -> str:
        return _product_source(config, self._epilogue, self.problem)

    def call(self, config: GemmConfig) -> KernelCall:
        return gemm_call(config, self._epilogue, self.problem, self.region, shared_epilogue(self.region)[1])

    def variants(self, config: GemmConfig) -> Iterable[GemmConfig]:
        return configs.runtime_variants(config, self.problem)

    @property
    def _epilogue(self) -> Epilogue:
        return shared_epilogue(self.region)[0]


def _product_source(config: GemmConfig, epilogue: Epilogue, problem: GemmProblem) -> str:
    orders = {"layout_a": problem.a.order, "layout_b": problem.b.order}
    return emit.emit_gemm(config, epilogue, **orders, batched=problem.batch > 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Convolutions:
    """Where a configuration is a matrix product's, so is its kernel: others in the model may share it."""

    region: CutlassRegion
    device: DeviceSpec
    problem: ConvolutionProblem

    def propose(self, count: int) -> Sequence[Ranked[AnyConvolutionConfig]]:
        return convolution_configs.propose_convolution(self.problem, self.device, self._epilogue, count=count)

    def why_none(self) -> str | None:
        return convolution_configs.why_no_convolution(self.problem, self.device, self._epilogue)

    def name(self, config: AnyConvolutionConfig) -> str:
        return config.name

    def time_us(self, config: AnyConvolutionConfig) -> float:
        return predict_convolution(config, self.problem, self.device, self._epilogue).time_us

    def source(self, config: AnyConvolutionConfig) -> str:
        tile = plain_tile(config)
        if tile is None:
            return emit_convolution.emit_convolution(config, self._epilogue)
        return _product_source(tile, self._epilogue, self.problem.product())

    def call(self, config: AnyConvolutionConfig) -> KernelCall:
        tile, places = plain_tile(config), shared_epilogue(self.region)[1]
        if tile is None:
            return convolution_call(config, self._epilogue, self.problem, self.region, places)
        return gemm_call(tile, self._epilogue, self.problem.product(), self.region, places)

    def variants(self, config: AnyConvolutionConfig) -> Iterable[AnyConvolutionConfig]:
        return convolution_configs.runtime_convolution_variants(config, self.problem, self.device, self._epilogue)

    @property
    def _epilogue(self) -> Epilogue:
        return shared_epilogue(self.region)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pairs:
    region: CutlassRegion
    device: DeviceSpec
    problem: PairProblem

    def propose(self, count: int) -> Sequence[Ranked[PairConfig]]:
        return propose_pair(self.problem, self.device, *self._epilogues, count)

    def why_none(self) -> str | None:
        return None  # `propose_pair` says it itself

    def name(self, config: PairConfig) -> str:
        return config.name

    def time_us(self, config: PairConfig) -> float:
        return predict_pair(config, self.problem, self.device, *self._epilogues).time_us

    def source(self, config: PairConfig) -> str:
        return emit_back_to_back.emit_pair(config, *self._epilogues, layout_b=self.problem.first.b.order)

    def call(self, config: PairConfig) -> KernelCall:
        assert self.region.then is not None
        places = (*shared_epilogue(self.region)[1], *shared_epilogue(self.region.then)[1])
        return pair_call(config, *self._epilogues, self.problem, self.region, places)

    def variants(self, _config: PairConfig) -> Iterable[PairConfig]:
        return ()

    @property
    def _epilogues(self) -> tuple[Epilogue, Epilogue]:
        assert self.region.then is not None
        return shared_epilogue(self.region)[0], shared_epilogue(self.region.then)[0]
