"""How many versions each buffer gets: from the user, or from the model of ALCOP §4 within the device's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tvm_ext._tvm import Stmt
from tvm_ext.cost.pipeline_workload import PipelineWorkload, blocks_per_unit, shared_bytes
from tvm_ext.devices.capabilities import ASYNC_COPIES_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import GLOBAL, shared_limit_bytes, static_shared_bytes
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.records.pipelines import PipelinedBuffer, PipelinePlan, PipelineRefusal
from tvm_ext.support.arithmetic import ceil_div

from .analyse import REGISTER_LEVEL, SHARED_LEVEL, LoadUse, find_load_use
from .choose_stages import choose_stages
from .count_statements import Counts, extent_of
from .detect import Detection, LoadGroup, detect
from .function import Function
from .loops import buffer_bytes, integer, is_shared, scope_of
from .move_functions import move_function
from .part_copies import AsyncLoader, Loader, asynchronous, through_registers
from .versions import version_bytes


# --- What ALCOP's model asks of a kernel (paper §4, Table 1), counted in its loops: bytes, operations, trips ----------
def workload_of(
    function: Function, group: LoadGroup, device: DeviceSpec, planned_registers: int | None = None
) -> PipelineWorkload:
    """What one threadblock does in the loop of ``group``, in the canonical ``function``, and how many blocks there are.

    ``planned_registers`` of a thread are the emitter's; without, they are estimated from the buffers in registers.

    Worked example, tiles of 128 x 128 x 64 in halves by eight warps of 64 x 32, mma.m16n8k16: 32 KiB are loaded in each
    iteration; each of its four inner steps reads 8 * (4 + 2) ldmatrix.x4 of 512 bytes, 24 KiB, and does
    8 * 4 * 4 * 2 * 16 * 8 * 16 = 524288 operations. A loop that a block runs several times counts as often, its output
    divided among the times.

    Raises IllegalRewrite where an extent is not known before the kernel runs, or not even one version fits the device.
    """
    counts = Counts(function, group, device, planned_registers)
    staged = [tile.buffer for tile in counts.tiles]
    stage = sum(version_bytes(b) for b in staged)
    shared = sum(buffer_bytes(s.buffer) for s in function.allocations_beside(group.loop) if is_shared(s.buffer))
    workload = PipelineWorkload(
        blocks=counts.blocks,
        warps_per_block=counts.warps,
        other_shared_bytes=shared - sum(map(buffer_bytes, staged)),
        stage_bytes=stage,
        registers_per_thread=counts.registers,
        register_stage_registers=sum(counts.registers_of(register.buffer) for register in group.registers),
        shared_trips=extent_of(group.loop),
        register_trips=counts.register_trips,
        flops_per_register_trip=counts.operations / counts.register_trips,
        bytes_per_shared_trip=sum(map(counts.loaded_bytes, counts.tiles)),
        shared_bytes_per_register_trip=counts.shared_read_bytes / counts.register_trips,
        output_bytes_per_block=counts.output_bytes / counts.loop_repeats,
        workset_bytes=0.0,
        workset_blocks=1,
        throughput=counts.throughput,
    )
    return _with_workset(workload, counts)


def _with_workset(workload: PipelineWorkload, counts: Counts) -> PipelineWorkload:
    """The distinct bytes that the blocks of a batch load: tiles from the same place count once.

    Where the cache holds all that is loaded, memory serves each byte once, whichever batch loads it first.
    """
    device = counts.device
    resident = blocks_per_unit(workload, device, shared_bytes(workload, 1), workload.registers_per_thread)
    blocks = min(workload.blocks, resident * device.unit_count)
    workset = sum(counts.distinct_tiles(tile, blocks) * counts.loaded_bytes(tile) for tile in counts.tiles)
    sources = counts.source_bytes
    if sources is not None and sources <= (device.layer(GLOBAL).cache_bytes or 0):
        iterations = workload.shared_trips * counts.loop_repeats * ceil_div(workload.blocks, blocks)
        workset = min(workset, sources / iterations)
    return replace(workload, workset_bytes=workset, workset_blocks=blocks)


PipeliningMode = Literal["none", "double", "multistage", "full"]
"""What ALCOP §5.1 compares: nothing, two versions of shared memory, several versions of it, registers as well."""

MODES: tuple[PipeliningMode, ...] = ("none", "double", "multistage", "full")

MOST_VERSIONS = 8  # a choice: the most of `choose_stages.SHARED_STAGES`

DEFAULT_SHARED, DEFAULT_REGISTERS = 3, 2
"""Where the model cannot say, because trip counts are not known before the kernel runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the user asked for: versions of shared memory and of registers, None for the model's choice; by buffer.

    ``always``: at least two versions wherever that is legal, whatever the model predicts. ``bulk_copies``: by Hopper's
    bulk copies, where those are legal. ``replace_stock``: instead of what stock TVM's annotations ask for.
    """

    mode: PipeliningMode = "full"
    shared_stages: int | None = None
    register_stages: int | None = None
    by_buffer: Mapping[str, int] | None = None
    always: bool = False
    bulk_copies: bool = False
    replace_stock: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"there is no pipelining mode {self.mode!r}", f"one of {', '.join(MODES)}")


def make_loader(function: Function, load_use: LoadUse, device: DeviceSpec) -> Loader:
    """How ``device`` loads the buffer ahead of its use; raises IllegalRewrite where it cannot.

    Stock StorageRewrite may lay a tile where a dead buffer of another type was, and what it is copied to by then
    points to that buffer's type: copies of halves would go to offsets in floats.
    """
    if has(device, ASYNC_COPIES_SINCE):
        other = function.shared_of_another_type_before(load_use.loop, load_use.buffer)
        if other is not None:
            raise IllegalRewrite(
                f"{load_use.name} may be laid where {other.name} was, which is {other.ty.dtype} and done with before",
                "make them of one type, or the earlier one no shared memory",
            )
        return asynchronous(load_use.copies, function.ranges)
    return through_registers(load_use.copies, function.ranges, by_compiler=device.kind != "rocm")


def move_functions(function: Function, names: tuple[str, ...]) -> Function:
    """``function`` with what is computed while these buffers are loaded computed by their users."""
    for name in names:
        body = move_function(function, find_load_use(function, name))
        function = Function(function.func.with_body(body))
    return function


def decide(
    function: Function, device: DeviceSpec, wishes: Wishes, planned_registers: Sequence[int] = ()
) -> PipelinePlan:
    """Detect what can be pipelined in the canonical ``function`` and choose the versions of every buffer.

    ``planned_registers`` are those of a thread of each launch, in order; none, or another number of them: estimated.
    """
    if wishes.mode == "none":
        reason = PipelineRefusal(buffer="*", scope="", rule="switched off", reason="pipelining is switched off")
        return PipelinePlan(refusals=(reason,))
    moved: list[str] = []
    found = _detected(function, device)
    while found.moved:
        moved += found.moved
        found = _detected(move_functions(found.function, tuple(found.moved)), device)
    planner = _Planner(found, device, wishes, planned_registers)
    for group in found.groups:
        planner.add(group)
    planner.refuse_alone()
    unknown = set(wishes.by_buffer or {}) - set(function.buffers)
    if unknown:
        raise InputError(
            f"versions are asked for of {', '.join(sorted(unknown))}, which the kernel does not allocate",
            f"it allocates {', '.join(function.buffers)}",
        )
    return PipelinePlan(
        buffers=tuple(planner.buffers), moved=tuple(moved), refusals=tuple(found.refusals), notes=tuple(planner.notes)
    )


def _detected(function: Function, device: DeviceSpec) -> Detection:
    return detect(function, lambda load_use: make_loader(function, load_use, device))


class _Planner:
    def __init__(self, found: Detection, device: DeviceSpec, wishes: Wishes, planned_registers: Sequence[int]) -> None:
        self.found, self.device, self.wishes = found, device, wishes
        self.planned_registers = planned_registers
        self.buffers: list[PipelinedBuffer] = []
        self.notes: list[str] = []

    def add(self, group: LoadGroup) -> None:
        """Choose the versions of one group's buffers."""
        registers = group.registers if self.wishes.mode == "full" else ()
        shared, register = self._choose(group, bool(registers))
        most = self._most_in_static_memory(group)
        if shared > most:
            self.notes.append(f"{shared} versions in loop {group.loop.loop_var.name} do not fit static memory: {most}")
            shared = most
        name = str(group.loop.loop_var.name)
        if shared < 2:
            for load_use, _ in group.shared:
                if self._asked(load_use.name) == 1:
                    self.found.refuse(load_use.name, load_use.buffer, "switched off", "one version was asked for")
                    continue
                why = f"a second version is predicted to gain nothing in loop {name}, or does not fit"
                self.found.refuse(load_use.name, load_use.buffer, "resources", why)
            return
        taken: list[LoadUse] = []
        for load_use, loader in group.shared:
            count = min(self._asked(load_use.name) or shared, self._trips(group) or MOST_VERSIONS, most)
            if count < 2:
                self.found.refuse(load_use.name, load_use.buffer, "switched off", "one version was asked for")
                continue
            taken.append(load_use)
            self.buffers.append(_planned(load_use, count, loader))
        if register > 1 and len(taken) == len(group.shared):
            self.buffers += [_planned(use, register, None) for use in registers]

    def _most_in_static_memory(self, group: LoadGroup) -> int:
        """Versions that fit where static tiles may not move to dynamic memory: beside a dynamic buffer of another type.

        Stock StorageRewrite would let that buffer lie where the tiles were, and later refuse its accesses. Worked
        example: wmma's halves beside the floats that its accumulators are stored by; 2 x 32 KiB exceed 48 KiB.
        """
        tiles = [load_use.buffer for load_use, _ in group.shared]
        types = {str(tile.ty.dtype) for tile in tiles}
        beside = [s.buffer for s in self.found.function.allocations_beside(group.loop)]
        is_static = all(scope_of(tile) == "shared" for tile in tiles)
        if not is_static or not any(scope_of(b) == "shared.dyn" and {str(b.ty.dtype)} != types for b in beside):
            return MOST_VERSIONS
        static = [b for b in beside if scope_of(b) == "shared" and not any(b.same_as(tile) for tile in tiles)]
        room = static_shared_bytes(self.device) - sum(map(buffer_bytes, static))
        return max(1, room // max(1, sum(version_bytes(load_use.buffer) for load_use, _ in group.shared)))

    def _asked(self, name: str) -> int | None:
        return (self.wishes.by_buffer or {}).get(name)

    def _trips(self, group: LoadGroup) -> int | None:
        return integer(group.loop.extent)

    def _planned_registers_of(self, group: LoadGroup) -> int | None:
        """As planned for the launch that ``group``'s loop is in; None where the plans are not of these launches."""
        function = self.found.function
        if len(self.planned_registers) != len(function.launches):
            return None
        own = function.launch_of(group.loop)
        pairs = zip(self.planned_registers, function.launches, strict=True)
        return next((count for count, launch in pairs if launch.same_as(own)), None)

    def _choose(self, group: LoadGroup, with_registers: bool) -> tuple[int, int]:
        wishes = self.wishes
        late = any(loader.is_late for _, loader in group.shared)
        asked = [count for load_use, _ in group.shared if (count := self._asked(load_use.name))]
        fixed = wishes.shared_stages or (max(asked) if asked else None)
        fixed_registers = wishes.register_stages if with_registers else 1
        asked_registers = [count for register in group.registers if (count := self._asked(register.name))]
        if with_registers and asked_registers:
            fixed_registers = max(asked_registers)
        if wishes.mode == "double":
            fixed = 2
        try:
            workload = workload_of(self.found.function, group, self.device, self._planned_registers_of(group))
            choice = choose_stages(
                workload, self.device, fixed_shared=fixed, fixed_register=fixed_registers, asynchronous=not late
            )
            if choice.shared_stages < 2 and wishes.always and fixed is None:
                choice = choose_stages(
                    workload, self.device, fixed_shared=2, fixed_register=fixed_registers, asynchronous=not late
                )
        except IllegalRewrite as unknown:
            self.notes.append(f"the model was not asked: {unknown.problem}")
            return self._default(group, fixed, fixed_registers, late)
        self.notes += choice.notes
        return choice.shared_stages, choice.register_stages

    def _default(self, group: LoadGroup, fixed: int | None, registers: int | None, late: bool) -> tuple[int, int]:
        shared = fixed or (2 if late else DEFAULT_SHARED)
        limit = shared_limit_bytes(self.device)
        tile = sum(version_bytes(load_use.buffer) for load_use, _ in group.shared)
        other = shared_bytes_around(self.found.function, group.loop) - tile
        most = max(1, (limit - other) // max(1, tile))
        if shared > most:
            self.notes.append(
                f"{shared} versions of {tile} bytes do not fit into {limit} bytes of shared memory: {most}"
            )
        shared = min(shared, most, self._trips(group) or MOST_VERSIONS)
        inner = integer(group.registers[0].loop.extent) if group.registers else None
        wanted = registers or DEFAULT_REGISTERS
        return shared, wanted if inner is not None and inner % wanted == 0 else 1

    def refuse_alone(self) -> None:
        """Register loads that no shared pipeline carries on: the compiler overlaps them within an iteration."""
        for load_use, why in self.found.alone:
            asked = self._asked(load_use.name)
            if asked and asked > 1 and self.wishes.mode == "full":
                self.buffers.append(_planned(load_use, asked, None))
                continue
            reason = f"its pipeline would begin anew in each iteration (Figure 3c): {why}"
            self.found.refuse(load_use.name, load_use.buffer, "synchronisation", reason)


def _planned(load_use: LoadUse, stages: int, loader: Loader | None) -> PipelinedBuffer:
    width = min(shape.bytes_each for shape in loader.shapes) if isinstance(loader, AsyncLoader) else None
    return PipelinedBuffer(
        name=load_use.name,
        scope=str(load_use.buffer.ty.storage_scope),
        loop=load_use.loop_name,
        level=SHARED_LEVEL if is_shared(load_use.buffer) else REGISTER_LEVEL,
        stages=stages,
        tile_bytes=version_bytes(load_use.buffer),
        copy_bytes=width,
    )


def shared_bytes_around(function: Function, loop: Stmt) -> int:
    """Shared memory of the launch that ``loop`` is in."""
    return sum(buffer_bytes(s.buffer) for s in function.allocations_beside(loop) if is_shared(s.buffer))
