"""Which configurations compile and run: the static assertions of CUTLASS 4.2.0, asked beforehand.

Each function says which header it mirrors. What does not end in an assertion but in a wrong or
slow kernel is refused as well: threads that would not cover a tile, accumulators that would not fit the registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import gcd

from tvm_ext.devices.capabilities import ASYNC_COPIES_SINCE, BULK_COPIES_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import BlockUse, max_block_threads, registers_left, shared_limit_bytes
from tvm_ext.support.arithmetic import ceil_div

from .elements import ELEMENTS
from .epilogue import Reduction, exchange_bytes
from .family import TemplateFamily
from .gemm import ACCESS_BITS, Alignments, GemmConfig, widest_access

WARP_GROUP_WARPS = 4
"""Warps that one wgmma is of (PTX ISA)."""
PORTABLE_CLUSTER = 8
"""Threadblocks of a cluster that every device of sm_90 runs (CUDA C++ Programming Guide)."""
_WGMMA_ROWS, _WGMMA_COLUMNS = 64, 256  # of one wgmma: its M, and its largest N (PTX ISA)
_EPILOGUE_ROWS = 8  # default_thread_map_tensor_op.h: tensor operations make 8 rows at a time
_EPILOGUE_ACCESS_BYTES = 256  # output_tile_thread_map.h: the preferred access of a warp
_COLLECTIVE_RESERVE_BYTES = 4096  # barriers, the scheduler's and the epilogue's pipelines, alignment between them
SMALLEST_ASYNC_COPY_BITS = 32  # arch/memory_sm80.h: cp.async takes 4, 8 or 16 bytes
REGISTERS_BESIDE_SUMS = 40  # addresses, predicates and counters of a main loop, about, by ptxas' counts


class ProductRules(TemplateFamily[GemmConfig]):
    """The rules for templates of matrix products: what decides which of a family's candidates are legal."""

    @cached_property
    def alignments(self) -> Alignments:
        """The widest accesses that the matrices allow."""
        a, b = self.problem.operands
        out = widest_access(self.problem.columns, self.out.bits)
        return Alignments(alignment_a=a.alignment, alignment_b=b.alignment, alignment_d=out)

    def reasons(self, config: GemmConfig) -> Iterator[str | None]:
        """Rule by rule, why ``config`` does not compile or run."""
        yield self._why_wrong_layout(config)
        yield self._why_misaligned(config)
        if self.epilogue.reduction is not None and config.split_k > 1:
            yield "stream-K's blocks have parts of a tile, and a reduction wants whole ones"
        if config.generation == "2.x":
            yield self.why_no_main_loop(config)
            yield self.why_no_store(config)
        elif not has(self.device, BULK_COPIES_SINCE):
            yield f"{self.device.name} has no bulk copies, which collectives are fed by"
            return
        else:
            if not config.multiplier.instructions:
                rounded = f"collectives would round {config.arithmetic} to tfloat32 (sm90_common.inl)"
                yield f"{rounded}, and it is asked for as it is"
            yield _why_wrong_collective(config)
            yield self._why_wrong_row_sums(config)
            yield self._why_not_bulk(config)
        yield self._why_too_many_registers(config)
        yield why_too_large(self.shared_bytes(config), self.device)

    def _why_wrong_layout(self, config: GemmConfig) -> str | None:
        """Matrix units read 8-bit operands along K; so do collectives of tfloat32 (sm90_common.inl: is_use_rmem_A)."""
        along_k = self.problem.orders == ("row", "column")
        kind = config.multiplier
        if (kind.k_contiguous or (config.generation == "3.x" and kind.bits != 16)) and not along_k:
            return f"{config.arithmetic} operands must lie along K (A row by row, B column by column) in this template"
        return None

    def _why_misaligned(self, config: GemmConfig) -> str | None:
        """Accesses that the problem's rows are not whole numbers of."""
        for name, widest in self.alignments.items():
            if getattr(config, name) > widest:
                return f"{name} {getattr(config, name)} is more than the problem's {widest}"
        return None

    def why_no_main_loop(self, config: GemmConfig) -> str | None:
        """The first reason why a 2.x template's threads cannot load and multiply tiles; None where they can."""
        if not _is_divided(config):
            return "the threadblock is not a whole number of warps, or the warp of instructions"
        return (
            self._why_wrong_stages(config)
            or _why_too_narrow(config)
            or self._why_wrong_warps(config)
            or self._why_uncovered(config)
        )

    def _why_wrong_stages(self, config: GemmConfig) -> str | None:
        """mma_pipelined.h has two stages, mma_multistage.h needs cp.async and is chosen for three or more."""
        if has(self.device, ASYNC_COPIES_SINCE) and config.architecture >= 80 and config.stages != 2:
            return None if config.stages >= 3 else "a template has at least 2 stages"
        return None if config.stages == 2 else "without asynchronous copies a template has 2 stages"

    def _why_wrong_warps(self, config: GemmConfig) -> str | None:
        """default_mma_core_sm80.h: "requires at least two warps"; a threadblock's threads are the device's to limit."""
        if config.warps < 2:
            return "a threadblock has at least two warps"
        most = max_block_threads(self.device)
        if most is not None and config.warps * self.device.teu_lanes > most:
            return f"{config.warps} warps are more than a block's {most} threads"
        return None

    def _why_uncovered(self, config: GemmConfig) -> str | None:
        """Whether the threads that load a tile of either operand cover it; vector units' maps cover any power of 2."""
        m, n, k = config.threadblock
        if config.is_simt:
            smallest = min(m, n) * k
            return None if smallest >= config.warps * 32 else "a tile has fewer elements than threads that load it"
        bits = config.multiplier.bits
        a, b = self.problem.orders
        for extent, along_k in ((m, a == "row"), (n, b == "column")):
            if not _is_raked(extent, k, config.warps, bits, along_k=along_k):
                return "the warps do not cover a tile of an operand in whole accesses"
        return None

    def why_no_store(self, config: GemmConfig) -> str | None:
        """Whether a 2.x template's threads cover a tile of the result.

        output_tile_thread_map.h, RowArrangement: "Iteration Count Row/Column must be > 0".
        """
        assert config.warp is not None
        warps_n = config.threadblock[1] // config.warp[1]
        width = config.threadblock[1] // config.alignment_d
        if config.is_simt:  # one row at a time, a lane for each column
            return None if width % (32 * warps_n) == 0 else "the warps do not cover a row of the result"
        rows = _EPILOGUE_ROWS // warps_n
        accesses = _EPILOGUE_ACCESS_BYTES * 8 // (config.alignment_d * self.out.bits)
        if rows == 0:
            return "there are more warps than rows in a step of the epilogue"
        if 32 // accesses > rows:
            across, down = 32 // rows, rows
        else:
            across = min(width, 32, accesses)
            down = min(_EPILOGUE_ROWS, 32 // across)
        if across > width or width % across or rows % down:
            return "the warps do not cover a row of the result in whole accesses"
        return None

    def _why_too_many_registers(self, config: GemmConfig) -> str | None:
        """A block's threads share what it may have: of 512 threads each has 128, for the templates ask for one block.

        A collective's warp groups hand registers on to one another (setmaxnreg): theirs are a thread's limit alone.
        """
        needed, threads = thread_registers(config) + self._reduced_registers(config), self.threads(config)
        most = registers_left(threads if config.generation == "2.x" else self.device.teu_lanes, self.device)
        if needed <= most:
            return None
        return (
            f"{needed} registers of a thread are more than the {most} that a block of {threads} threads leaves to each"
        )

    def _reduced_registers(self, config: GemmConfig) -> int:
        """What a thread of a collective keeps of a reduction: two of every 8 columns, or of every 16 rows."""
        reduction = self.epilogue.reduction
        if reduction is None or config.generation == "2.x":
            return 0
        return config.threadblock[1] // 4 if reduction.over == "rows" else config.threadblock[0] // 32

    def use(self, config: GemmConfig) -> BlockUse:
        """What a threadblock takes of its unit."""
        threads, registers = self.threads(config), thread_registers(config)
        if config.generation == "3.x":
            registers = min(registers, registers_left(threads, self.device))
        return BlockUse(threads=threads, registers=registers, shared_bytes=self.shared_bytes(config))

    def threads(self, config: GemmConfig) -> int:
        """Of a threadblock. A collective has a warp group for the copies beside those that multiply."""
        warps = config.warps if config.generation == "2.x" else (config.groups + 1) * WARP_GROUP_WARPS
        return warps * self.device.teu_lanes

    def shared_bytes(self, config: GemmConfig) -> int:
        """Shared memory of a threadblock."""
        if config.generation == "2.x":
            return shared_bytes_2x(config, self.epilogue.reduction)
        return self._collective_bytes(config)

    def _why_wrong_row_sums(self, config: GemmConfig) -> str | None:
        """sm90_visitor_store_tma_warpspecialized.hpp, SwapShuffle, which asserts nothing and would add up wrongly.

        Eight lanes divide a thread's sums, two of every 8 columns, pair by pair. Worked example: 160 columns are 20
        pairs, of which a lane would get 2, and 4 nobody. With fewer than 8 pairs, each lane adds up all of them.
        """
        reduction, columns = self.epilogue.reduction, config.threadblock[1]
        if reduction is None or reduction.over == "columns" or columns < 64 or columns % 64 == 0:
            return None
        return f"eight lanes do not divide the sums of {columns} columns, but of multiples of 64 and of fewer"

    def _why_not_bulk(self, config: GemmConfig) -> str | None:
        """sm90_common.inl: "Should meet TMA alignment requirement", 16 bytes of every matrix that is copied in bulk."""
        if self.problem.batch > 1 and any(operand.batch_stride == 0 for operand in self.problem.operands):
            return "bulk copies need a distance between the matrices of a batch, and all of one operand's are the same"
        bits = config.multiplier.bits
        widths = {"A": config.alignment_a * bits, "B": config.alignment_b * bits}
        if self.epilogue.reduction is None:
            widths["D"] = config.alignment_d * self.out.bits
        for operand in self.epilogue.operands:
            if operand.role == "matrix":
                own = ELEMENTS[operand.dtype].bits
                widths[operand.name] = widest_access(self.problem.columns, own) * own
        narrow = [name for name, width in widths.items() if width < ACCESS_BITS]
        if narrow:
            return f"rows of {', '.join(narrow)} are no multiples of 16 bytes, as bulk copies need: pad the operands"
        return None

    def _collective_bytes(self, config: GemmConfig) -> int:
        """Of a collective: its stages and, beside them, the epilogue's tiles (sm90_builder.inl)."""
        m, n, k = config.threadblock
        main = config.stages * (m + n) * k * config.multiplier.bits // 8
        cooperative = config.schedule == "cooperative"
        tile_n = 64 if not cooperative and self.out.bits == 8 and n % 64 == 0 else 32
        tile = min(128 if cooperative else 64, m) * gcd(tile_n, n)
        tiles = m * n // tile
        stored = tile * self.out.bits // 8 * min(tiles, 2)
        each = {"matrix": tile * min(tiles, 4), "row": n}
        loaded = sum(
            each.get(operand.role, 0) * ELEMENTS[operand.dtype].bits // 8 for operand in self.epilogue.operands
        )
        return main + stored + loaded + _COLLECTIVE_RESERVE_BYTES


def _is_divided(config: GemmConfig) -> bool:
    """default_mma_core_sm*.h, and mma_base.h: the loop over a warp's instructions along K has an even count."""
    assert config.warp is not None
    assert config.instruction is not None
    whole = all(t % w == 0 for t, w in zip(config.threadblock[:2], config.warp[:2], strict=True))
    instructions = all(w % i == 0 for w, i in zip(config.warp, config.instruction, strict=True))
    steps = config.warp[2] // config.instruction[2]
    return whole and instructions and config.threadblock[2] == config.warp[2] and steps >= 2 and steps % 2 == 0


def _why_too_narrow(config: GemmConfig) -> str | None:
    bits = config.multiplier.bits
    narrowest = min(config.alignment_a, config.alignment_b) * bits
    if config.stages > 2 and narrowest < SMALLEST_ASYNC_COPY_BITS:
        return (
            f"accesses of {narrowest} bits cannot be copied asynchronously: pad the operands' contiguous extents to "
            f"multiples of {ACCESS_BITS // bits}"
        )
    return None


def _is_raked(extent: int, k: int, warps: int, bits: int, *, along_k: bool) -> bool:
    """pitch_linear_thread_map.h, PitchLinearWarpRakedThreadMap, with the arrangements of default_mma_core_sm80.h.

    Worked example, 128 x 32 halves along K by 4 warps: 4 accesses of 8 halves to a row, a warp takes 8 rows, so there
    are 16 of its accesses one below the other, 4 for each warp. 32 rows would be 4, one each, and 8 warps do not go.
    """
    access = ACCESS_BITS // bits
    contiguous, strided = (k, extent) if along_k else (extent, k)
    lanes = (k // access, 32 // (k // access)) if along_k else (8, 4)
    if contiguous % (access * lanes[0]) or strided % lanes[1]:
        return False
    across, down = contiguous // access // lanes[0], strided // lanes[1]
    warps_down = min(warps, down)
    warps_across = warps // warps_down
    return warps_down * warps_across == warps and down % warps_down == 0 and across % warps_across == 0


def thread_registers(config: GemmConfig) -> int:
    """Registers of a thread, estimated: its sums, the operands of one step and of the next, and what is beside them."""
    bits = config.multiplier.bits
    if config.warp is None or config.instruction is None:
        groups = 2 if config.schedule == "cooperative" else 1
        sums = config.threadblock[0] * config.threadblock[1] // (groups * WARP_GROUP_WARPS * 32)
        return sums + REGISTERS_BESIDE_SUMS
    wm, wn, _ = config.warp
    operands = 2 * ceil_div((wm + wn) * max(config.instruction[2], 1) * bits, 32 * (4 if config.is_simt else 32))
    return wm * wn // 32 + operands + REGISTERS_BESIDE_SUMS


def shared_bytes_2x(config: GemmConfig, reduction: Reduction | None = None) -> int:
    """Shared memory of a threadblock: its stages, or what the epilogue keeps, for one takes the other's place."""
    assert config.warp is not None
    m, n, k = config.threadblock
    padding = 4 * 2 if config.is_simt else 0  # default_mma_core_simt.h pads rows against bank conflicts
    main = config.stages * (m + n + padding) * k * config.multiplier.bits // 8
    sums = m // config.warp[0] * _EPILOGUE_ROWS * (n + 2 * _EPILOGUE_ROWS) * 4
    return max(main, 2 * sums + exchange_bytes(reduction, n, config.warps * 32, config.alignment_d))


def why_too_large(needed: int, device: DeviceSpec) -> str | None:
    most = shared_limit_bytes(device)
    return f"{needed} bytes of shared memory are more than a block's {most}" if needed > most else None


def _why_wrong_collective(config: GemmConfig) -> str | None:
    """sm90_gemm_tma_warpspecialized_{cooperative,pingpong}.hpp, sm90_builder.inl, mma_sm90_gmma.hpp."""
    m, n, k = config.threadblock
    rows = _WGMMA_ROWS * (2 if config.schedule == "cooperative" else 1)
    if m % rows or n % 16 or n > _WGMMA_COLUMNS:
        return f"{config.schedule} tiles have M in multiples of {rows}, N in multiples of 16 up to {_WGMMA_COLUMNS}"
    if k * config.multiplier.bits != ACCESS_BITS * 8:
        return "a collective's tile is 128 bytes wide along K, a swizzled row of shared memory"
    if config.schedule != "cooperative" and config.split_k > 1:
        return f"{config.schedule} kernels have no stream-K scheduler"
    if config.stages < 2:
        return "a collective has at least 2 stages"
    if config.cluster[0] * config.cluster[1] > PORTABLE_CLUSTER:
        return f"a cluster has at most {PORTABLE_CLUSTER} threadblocks"
    return None
