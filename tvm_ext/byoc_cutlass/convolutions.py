"""Convolutions: the tiles of `products`, each with the iterators that read its windows.

A convolution whose filters have one position and no stride is a matrix product as it lies: the matrix product's
templates are candidates beside its own, and the model chooses. What tiles alone decide, `legality` says; each rule here
names the header that it mirrors. `emit_convolution` writes the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from tvm_ext.devices.capabilities import BULK_COPIES_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import registers_left
from tvm_ext.records.partition import CutlassProblem, CutlassRegion, ImplicitWindow
from tvm_ext.support.arithmetic import ceil_div

from . import emit_convolution, products
from .convolution import WINDOWED, ConvolutionConfig, PlanesRead
from .convolution import Iterator as Reader
from .epilogue import Epilogue
from .family import Config, PredictedTime, TemplateFamily
from .gemm import ACCESS_BITS, GemmConfig
from .host import KernelCall
from .legality import SMALLEST_ASYNC_COPY_BITS, thread_registers
from .products import SPLITS, ProductFamily

_FEW = 8  # channels of one access of halves, 16 bytes: of more the other iterators' accesses are as wide
_INSTRUCTIONS: dict[Reader, int] = {
    "plain": 4, "optimized": 6, "analytic": 24, "few_channels": 40, "fixed_channels": 30, "planes": 50, "bulk": 0
}  # fmt: skip
"""Of a thread for one access, counted in the iterators' sources: pointers stepped under a mask, or coordinates divided
out, compared with the extents and multiplied by the strides. Of planes each element has a load of its own."""
_RUN_INSTRUCTIONS = 8
"""For one run of columns in an access of planes: its channel and row are found, and compared with the extents."""
WIDEST_RUN = 8
"""Columns of a window in one access of halves, 16 bytes."""
MASK_POSITIONS = 32
"""Positions of a filter each way that the optimized iterator's masks have bits for."""
_ITERATOR_REGISTERS: dict[Reader, int] = {
    "optimized": 20,
    "analytic": 24,
    "few_channels": 40,
    "fixed_channels": 32,
    "planes": 28,
}
"""Pointers, masks and coordinates of both operands, about, by ptxas' counts for the kernels of the tests."""
_MOST_BYTES = 2**31  # of a tensor: device/implicit_gemm_convolution.h, can_implement
_MOST_PADDING = 256  # of two spatial axes: sm90_implicit_gemm_gmma_ss_warpspecialized.hpp, can_implement
_LEAST_CORNER, _MOST_CORNER, _MOST_OFFSET = -128, 127, 255  # cuTensorMapEncodeIm2col: 8 bits for each of two axes
_MOST_STRIDE = 8  # cuTensorMapEncodeIm2col's elementStrides


class WindowFamily(TemplateFamily[Config]):
    """What families of convolutions have in common."""

    form = emit_convolution.CONVOLUTION_CALL
    does = "convolves"

    def __init__(self, problem: CutlassProblem, device: DeviceSpec, epilogue: Epilogue) -> None:
        super().__init__(problem, device, epilogue)
        assert problem.window is not None
        self.window = problem.window

    def extents(self) -> tuple[int, ...]:
        """What a launch is told of the window."""
        window = self.window
        extents = (*window.input_extents, self.problem.columns, *window.filter_extents, *window.output_extents)
        return *extents, *window.numbers, window.groups

    def why_too_many_bytes(self) -> str | None:
        """device/implicit_gemm_convolution.h: each tensor has fewer than 2^31 bytes."""
        factors = (count * self.multiplier.bits for count in self.problem.factor_elements)
        sizes = (*factors, self.problem.rows * self.problem.columns * self.out.bits)
        if max(sizes) // 8 >= _MOST_BYTES:
            return f"a tensor of {max(sizes) // 8} bytes is too large for templates, which count {_MOST_BYTES}"
        return None

    def why_too_many_registers(self, needed: int, threads: int) -> str | None:
        """What would be spilled: ptxas' counts for the kernels of the tests."""
        most = registers_left(threads, self.device)
        return f"{needed} registers of a thread are more than its {most}" if needed > most else None


class ConvolutionFamily(WindowFamily[ConvolutionConfig]):
    """One convolution as an implicit product; of the iterator "plain" the kernel is a matrix product's, and shared."""

    def __init__(self, problem: CutlassProblem, device: DeviceSpec, epilogue: Epilogue) -> None:
        super().__init__(problem, device, epilogue)
        self.product = ProductFamily(problem, device, epilogue)

    def candidates(self) -> Iterator[ConvolutionConfig]:
        if self.window.planes_of:
            planes = PlanesRead(dtype=self.window.planes_of, run=gcd(self.window.filter_extents[1], WIDEST_RUN))
            for tile in self.product.pipelined_tiles():
                yield ConvolutionConfig(
                    tile=tile, iterator="planes", planes=planes, stores_planes=self.window.stores_planes
                )
            return
        narrow = self.problem.operands[0].alignment * self.multiplier.bits < SMALLEST_ASYNC_COPY_BITS
        for tile in (*self.product.candidates(), *(self.product.two_stage_tiles() if narrow else ())):
            if tile.generation == "2.x":
                yield from self._window_configs(tile)
            if self.window.is_plain and not self.window.stores_planes:
                yield ConvolutionConfig(tile=tile, iterator="plain")
        if has(self.device, BULK_COPIES_SINCE) and not self.window.stores_planes:
            for tile in self.product.collective_tiles(("single",)):
                yield ConvolutionConfig(tile=tile, iterator="bulk")

    def reasons(self, config: ConvolutionConfig) -> Iterator[str | None]:
        yield self.why_too_many_bytes()
        yield _why_wrong_generation(config)
        yield self._why_wrong_groups(config)
        yield _why_wrong_iterator(config, self.window)
        if config.iterator == "bulk":
            yield _why_not_im2col(self.window, self.epilogue)
        yield _why_wrong_split(config, self.window)
        yield from self.product.reasons(config.tile)
        if config.tile.generation == "2.x" and config.iterator != "plain":
            threads = self.product.threads(config.tile)
            yield self.why_too_many_registers(_registers(config, threads), threads)

    def predict(self, config: ConvolutionConfig) -> PredictedTime:
        """`ranking`'s model of the implicit product; its depth is what the template steps over, zeros included.

        Activations are moved once, not once for each position of the filter. An iterator that computes coordinates
        costs the vector units' instructions: narrow accesses and few channels make them the limit.
        """
        depth = self.steps(config) * config.tile.threadblock[2] * config.split  # with what is multiplied by zeros
        product = ProductFamily(replace(self.problem, depth=depth), self.device, self.epilogue)
        return product.predict(config.tile, issue_us=self._issue_us(config))

    def steps(self, config: ConvolutionConfig) -> int:
        """Steps along the depth that a threadblock takes (conv2d_problem_size.h, implicit_gemm_k_iterations)."""
        k, window, channels = config.tile.threadblock[2], self.window, self.window.channels
        if config.iterator == "plain":
            return ceil_div(ceil_div(channels, k), config.split)
        if config.iterator == "fixed_channels":
            return ceil_div(window.positions, max(1, k // channels))
        if config.iterator in ("few_channels", "planes"):
            return ceil_div(window.positions * channels, k)
        groups = config.tile.threadblock[1] // self.group_filters if config.grouping == "multiple" else 1
        return window.positions * ceil_div(ceil_div(channels, config.split), k) * max(1, groups)

    @property
    def group_filters(self) -> int:
        return self.problem.columns // self.window.groups

    def _issue_us(self, config: ConvolutionConfig) -> float:
        """Instructions that find what one step of a threadblock loads, on its unit's vector units."""
        peak = self.device.emitted_gflops_of("float32")
        if peak is None:
            return 0.0
        m, n, k = config.tile.threadblock
        accesses = [m * k / config.tile.alignment_a, n * k / config.tile.alignment_b]
        instructions = [_INSTRUCTIONS[config.iterator]] * 2
        if config.planes is not None:
            instructions = [
                instructions[0] + _RUN_INSTRUCTIONS * config.tile.alignment_a // config.planes.run,
                _INSTRUCTIONS["few_channels"],
            ]
        issued = sum(count * each for count, each in zip(accesses, instructions, strict=True))
        return issued / (peak / 2 / self.device.unit_count * 1e3)

    def preference(self, config: ConvolutionConfig) -> tuple[int, int]:
        return products.roomy(config.tile)

    def splits(self, config: ConvolutionConfig) -> Iterator[ConvolutionConfig]:
        """In slices where its tiles leave units idle and every slice keeps its stages filled."""
        yield config
        tiles = config.tile.tiles(self.problem)
        for split in () if products.has_no_splits(config.tile) else SPLITS[1:]:
            sliced = config.with_split(split)
            if tiles * split > self.device.unit_count * 2:
                return
            if self._is_filled(sliced):
                yield sliced

    def variants(self, config: ConvolutionConfig) -> Iterator[ConvolutionConfig]:
        """Slices of channels; of a matrix product its own."""
        if config.iterator == "plain":
            yield from (replace(config, tile=tile) for tile in self.product.variants(config.tile))
        elif config.iterator != "bulk" and not config.tile.is_simt:
            for sliced in map(config.with_split, SPLITS):
                if sliced != config and (sliced.split == 1 or self._is_filled(sliced)):
                    yield sliced

    def _is_filled(self, config: ConvolutionConfig) -> bool:
        """Whether the slices are legal, and every one of them fills its stages."""
        return self.steps(config) >= config.tile.stages and self.why_illegal(config) is None

    def source(self, config: ConvolutionConfig) -> str:
        if config.iterator == "plain":
            return self.product.source(config.tile)
        return emit_convolution.emit_convolution(config, self.epilogue)

    def numbers(self, config: ConvolutionConfig) -> tuple[int, ...]:
        tuning = (config.split, config.tile.swizzle, int(config.tile.raster == "along_m"), 0)
        return *self.extents(), *tuning

    def call(self, config: ConvolutionConfig, region: CutlassRegion) -> KernelCall:
        if config.iterator == "plain":
            return self.product.call(config.tile, region)
        return super().call(config, region)

    def _window_configs(self, tile: GemmConfig) -> Iterator[ConvolutionConfig]:
        """2.x templates on ``tile``. Stepped pointers are never slower than coordinates where both are possible."""
        stepped: Reader = "optimized" if max(self.window.filter_extents) <= MASK_POSITIONS else "analytic"
        if self.window.groups > 1:
            yield ConvolutionConfig(tile=tile, iterator=stepped, grouping="single")
            yield ConvolutionConfig(tile=tile, iterator="analytic", grouping="multiple")
            return
        few: tuple[Reader, ...] = ("few_channels", "fixed_channels") if self.window.channels <= _FEW else ()
        for iterator in (stepped, *few):
            yield ConvolutionConfig(tile=tile, iterator=iterator, stores_planes=self.window.stores_planes)

    def _why_wrong_groups(self, config: ConvolutionConfig) -> str | None:
        """device/implicit_gemm_convolution.h, can_implement."""
        if (config.grouping == "none") != (self.window.groups == 1):
            return "templates without groups are for one group, those with groups for several"
        if config.grouping == "none":
            return None
        tile_n, filters = config.tile.threadblock[1], self.group_filters
        if config.iterator not in ("optimized", "analytic") or config.tile.is_simt:
            return "groups are for the optimized and the analytic iterator on matrix units"
        if config.grouping == "single":
            return None if filters % tile_n == 0 else f"a group's {filters} filters are no whole tiles of {tile_n}"
        if config.iterator != "analytic":
            return "several groups in one tile are for the analytic iterator"
        return None if tile_n % filters == 0 else f"a tile of {tile_n} is no whole groups of {filters} filters"


# --- legality: static assertions and run-time checks of CUTLASS 4.2.0 ------------------------------------------------
def _why_wrong_generation(config: ConvolutionConfig) -> str | None:
    """conv/dispatch_policy.hpp: "Persistent schedules not support for conv yet"."""
    if config.iterator == "bulk":
        return (
            None if config.tile.schedule == "single" else "bulk copies of windows have one warp group that multiplies"
        )
    if config.tile.schedule == "single":
        return "a single warp group multiplies in convolutions alone"
    if config.tile.generation == "3.x" and config.iterator != "plain":
        return f"the iterator {config.iterator} is for 2.x templates"
    return None


def _why_wrong_iterator(config: ConvolutionConfig, window: ImplicitWindow) -> str | None:
    """conv2d_fprop_activation_tile_access_iterator_*.h."""
    if (config.iterator == "planes", config.stores_planes) != (bool(window.planes_of), window.stores_planes):
        return "a template reads and stores either NHWC or NCHW"
    if config.iterator == "plain" and not window.is_plain:
        return "only filters of one position, with neither strides nor padding, are plain matrix products"
    if config.iterator == "optimized" and max(window.filter_extents) > MASK_POSITIONS:
        return f"the optimized iterator has masks for {MASK_POSITIONS} positions of a filter each way"
    if config.iterator in WINDOWED and config.tile.is_simt:
        return "templates for few channels are on matrix units"
    if config.iterator == "fixed_channels":
        if config.tile.alignment_a != window.channels or config.tile.alignment_b != window.channels:
            return "fixed channels are those of one access"
        if config.tile.threadblock[2] % window.channels:
            return "a tile's depth is no whole number of positions"
    return None


def _why_not_im2col(window: ImplicitWindow, epilogue: Epilogue) -> str | None:
    """sm90_implicit_gemm_gmma_ss_warpspecialized.hpp, can_implement; what cuTensorMapEncodeIm2col takes."""
    if window.groups > 1:
        return "collectives have no groups"
    if epilogue.reduction is not None:
        return "a collective's reductions know rows, and none that are windows (sm90_visitor_store_*.hpp)"
    if sum(operand.role == "matrix" for operand in epilogue.operands) > 1:
        return "a collective loads one whole matrix for its epilogue, as its rows are windows"
    for lower, behind, extent, step, stride in zip(
        window.padding, window.padding_behind, window.filter_extents, window.dilation, window.strides, strict=True
    ):
        offset = (extent - 1) * step
        if max(lower, behind) > _MOST_PADDING or offset >= _MOST_OFFSET or stride > _MOST_STRIDE:
            return "bulk copies of windows have no such padding, stride or dilation"
        if not (_LEAST_CORNER <= -lower <= _MOST_CORNER and _LEAST_CORNER <= behind - offset <= _MOST_CORNER):
            return "bulk copies of windows have no such padding, stride or dilation"
    return None


def _why_wrong_split(config: ConvolutionConfig, window: ImplicitWindow) -> str | None:
    """conv2d_problem_size.h: it is the channels that are split, in whole tiles."""
    split = config.tile.split_k
    if split == 1 or config.iterator == "plain":
        return None
    if config.iterator in WINDOWED or config.grouping != "none" or config.iterator == "bulk":
        return "this template has no slices of channels"
    if split > ceil_div(window.channels, config.tile.threadblock[2]):
        return f"{window.channels} channels are no {split} slices of whole tiles"
    return None


def _registers(config: ConvolutionConfig, threads: int) -> int:
    """Of a thread: its tile's, its iterators', and without asynchronous copies what it loads for the next step.

    The optimized iterator has two masks for each of a thread's accesses. Worked example: of 256 x 32 halves each of 128
    threads has 8 pieces of 16 bytes, 16 masks; read two halves at a time, 64.
    """
    m, n, k = config.tile.threadblock
    bits = config.tile.multiplier.bits
    staged = (m + n) * k * bits // 32 // threads if config.tile.stages == 2 else 0
    pieces, narrower = m * k * bits // ACCESS_BITS // threads, ACCESS_BITS // bits // config.tile.alignment_a
    masks = 2 * pieces * (narrower - 1) if config.iterator == "optimized" and not config.tile.is_simt else 0
    masks += 3 * pieces if config.iterator == "planes" else 0  # where each piece's window begins: h, w, address
    return thread_registers(config.tile) + _ITERATOR_REGISTERS[config.iterator] + staged + masks
