"""Convolutions: the tiles of `products`, each with the iterators that read its windows.

A convolution whose filters have one position and no stride is a matrix product as it lies: the matrix product's
templates are candidates beside its own, and the model chooses. `convolution_legality` refuses what the headers would
refuse, `emit_convolution` writes the source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from math import prod

from tvm_ext.devices.capabilities import BULK_COPIES_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.partition import CutlassRegion

from . import emit_convolution, products
from .convolution import ConvolutionConfig, ConvolutionProblem
from .convolution import Iterator as Reader
from .convolution_legality import MASK_POSITIONS, convolution_reasons
from .epilogue import Epilogue
from .family import PredictedTime, TemplateFamily
from .gemm import GemmConfig
from .host import KernelCall
from .legality import SMALLEST_ASYNC_COPY_BITS
from .products import SPLITS, ProductFamily
from .ranking import predict_product

_FEW = 8
_INSTRUCTIONS: dict[Reader, int] = {
    "plain": 4, "optimized": 6, "analytic": 24, "few_channels": 40, "fixed_channels": 30, "bulk": 0
}  # fmt: skip
"""Of a thread for one access, counted in the iterators' sources: pointers stepped under a mask, or coordinates divided
out, compared with the extents and multiplied by the strides."""


class ConvolutionFamily(TemplateFamily[ConvolutionProblem, ConvolutionConfig]):
    """One convolution as an implicit product; of the iterator "plain" the kernel is a matrix product's, and shared."""

    form = emit_convolution.CONVOLUTION_CALL
    does = "convolves"

    def __init__(self, problem: ConvolutionProblem, device: DeviceSpec, *epilogues: Epilogue) -> None:
        super().__init__(problem, device, *epilogues)
        self.product = ProductFamily(problem.product(), device, *epilogues)

    @staticmethod
    def serves(region: CutlassRegion) -> bool:
        return region.then is None and region.problem.anchor in ("conv2d", "conv2d_grouped")

    @staticmethod
    def problem_of(region: CutlassRegion) -> ConvolutionProblem:
        return ConvolutionProblem.of(region.problem, region.out_dtype)

    def candidates(self) -> Iterator[ConvolutionConfig]:
        return candidates(self.problem, self.device)

    def reasons(self, config: ConvolutionConfig) -> Iterator[str | None]:
        return convolution_reasons(config, self.problem, self.device, self.epilogue)

    def predict(self, config: ConvolutionConfig) -> PredictedTime:
        """`ranking`'s model of the implicit product; its depth is what the template steps over, zeros included.

        Activations are moved once, not once for each position of the filter. An iterator that computes coordinates
        costs the vector units' instructions: narrow accesses and few channels make them the limit.
        """
        return predict_product(
            config.tile, config.product(self.problem), self.device, self.epilogue,
            read_bits=read_bits(self.problem), issue_us=self._issue_us(config),
        )  # fmt: skip

    def _issue_us(self, config: ConvolutionConfig) -> float:
        """Instructions that find what one step of a threadblock loads, on its unit's vector units."""
        peak = self.device.emitted_gflops_of("float32")
        if peak is None:
            return 0.0
        m, n, k = config.tile.threadblock
        accesses = m * k / config.tile.alignment_a + n * k / config.tile.alignment_b
        return accesses * _INSTRUCTIONS[config.iterator] / (peak / 2 / self.device.unit_count * 1e3)

    def preference(self, config: ConvolutionConfig) -> tuple[int, int]:
        return products.roomy(config.tile)

    def splits(self, config: ConvolutionConfig) -> Iterator[ConvolutionConfig]:
        """In slices where its tiles leave units idle and every slice keeps its stages filled."""
        yield config
        tiles = config.tile.tiles(self.product.problem)
        for split in () if products.has_no_splits(config.tile) else SPLITS[1:]:
            sliced = config.with_split(split)
            if tiles * split > self.device.unit_count * 2:
                return
            if self._is_filled(sliced):
                yield sliced

    def variants(self, config: ConvolutionConfig) -> Iterator[ConvolutionConfig]:
        """Slices of channels; of a matrix product its own."""
        if config.iterator == "plain":
            yield from (dataclasses.replace(config, tile=tile) for tile in self.product.variants(config.tile))
        elif config.iterator != "bulk" and not config.tile.is_simt:
            for sliced in map(config.with_split, SPLITS):
                if sliced != config and (sliced.split == 1 or self._is_filled(sliced)):
                    yield sliced

    def _is_filled(self, config: ConvolutionConfig) -> bool:
        """Whether the slices are legal, and every one of them fills its stages."""
        return config.steps(self.problem) >= config.tile.stages and self.why_illegal(config) is None

    def symbol(self, config: ConvolutionConfig) -> str:
        return emit_convolution.symbol_of(config, self.epilogue)

    def source(self, config: ConvolutionConfig) -> str:
        if config.iterator == "plain":
            return self.product.source(config.tile)
        return emit_convolution.emit_convolution(config, self.epilogue)

    def numbers(self, config: ConvolutionConfig) -> tuple[int, ...]:
        tuning = (config.split, config.tile.swizzle, int(config.tile.raster == "along_m"), 0)
        return *self.problem.numbers, *tuning

    def call(self, config: ConvolutionConfig, region: CutlassRegion) -> KernelCall:
        if config.iterator == "plain":
            return self.product.call(config.tile, region)
        return super().call(config, region)


def read_bits(problem: ConvolutionProblem) -> int:
    """Of activations and filters, each once."""
    filters = problem.filters * problem.positions * problem.channels
    return (prod(problem.window.input_extents) + filters) * problem.multiplier.bits


# --- candidates ------------------------------------------------------------------------------------------------------
def candidates(problem: ConvolutionProblem, device: DeviceSpec) -> Iterator[ConvolutionConfig]:
    """Configurations worth a look, legal or not."""
    product = problem.product()
    narrow = product.a.alignment * problem.multiplier.bits < SMALLEST_ASYNC_COPY_BITS
    staged = products.two_stage_candidates(product, device) if narrow else ()
    for tile in (*products.candidates(product, device), *staged):
        if tile.generation == "2.x":
            yield from _windowed(tile, problem)
        if problem.is_plain:
            yield ConvolutionConfig(tile=tile, iterator="plain")
    if has(device, BULK_COPIES_SINCE):
        for tile in products.single_group_candidates(product):
            yield ConvolutionConfig(tile=tile, iterator="bulk")


def _windowed(tile: GemmConfig, problem: ConvolutionProblem) -> Iterator[ConvolutionConfig]:
    """2.x templates on ``tile``. Stepped pointers are never slower than coordinates where both are possible."""
    stepped: Reader = "optimized" if max(problem.window.filter_extents) <= MASK_POSITIONS else "analytic"
    if problem.window.groups > 1:
        yield ConvolutionConfig(tile=tile, iterator=stepped, grouping="single")
        yield ConvolutionConfig(tile=tile, iterator="analytic", grouping="multiple")
        return
    yield ConvolutionConfig(tile=tile, iterator=stepped)
    if problem.channels <= _FEW:
        yield ConvolutionConfig(tile=tile, iterator="few_channels")
        yield ConvolutionConfig(tile=tile, iterator="fixed_channels")
