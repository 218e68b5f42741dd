"""Makes one GPU kernel of each schedule of rTasks (Rammer, §4.1), and the table that it walks.

Behind `ScheduleWavefronts`, whose plans say which rKernel runs when, on which data. What the plan calls an argument
becomes a parameter; constants are one parameter together, so that operators that differ in their weights alone share a
body. Three levels:

- *static*, the schedule's own streams, where the compiler's report says that all blocks are resident at once;
- *ticket*, where it does not, or there is no compiler to ask: right with any number of resident blocks;
- *waves*, a launch for what waits for nothing in it: where nothing waits at all, on GPUs without acquiring loads, and
  where so many bodies in one kernel need more registers than a thread has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from tvm_ext._tvm import ALREADY_SCHEDULED, IRModule, PassContext, PrimFunc, Stmt, copy_module, ir, module_pass
from tvm_ext.devices.capabilities import blocks_may_wait
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit, static_shared_bytes
from tvm_ext.ir.build_ir import rename_apart, sequence
from tvm_ext.records.merged import HEAD_WORDS, MERGED, NOT_CHOSEN, CompiledUse, MergedKernel, MergedLaunch, MergeLevel
from tvm_ext.records.rammer import RAMMER, RTASK_PLANS, RammerRecord, SchedulePlan
from tvm_ext.records.rtask_split import RKERNEL
from tvm_ext.records.rtasks import RTaskProgram, RTaskSchedule, ScheduleEntry
from tvm_ext.records.serialise import from_json, to_json

from .emit.gpu_merged.kernel import LaunchForm, launch_statement
from .emit.gpu_merged.operands import Bodies, Operands, flat_buffer
from .emit.gpu_merged.relocate import need_of
from .emit.gpu_merged.tables import LaunchTable, Streams, in_one_order, launch_table, needed_waits, waves_of

AskCompiler = Callable[[PrimFunc], CompiledUse | str]
"""What the compiler says of a function of one launch; as text, why nobody asked it."""

OperatorWaits = dict[int, tuple[int, ...]]


@module_pass(opt_level=0, name="tvm_ext.MergeRTasks")
class MergeRTasks:
    """Add a function for every plan of the module, under its name, and drop plans and rKernels.

    ``measure`` asks the device's compiler; `RAMMER` then says which level each schedule has, and why.
    """

    def __init__(self, device: DeviceSpec, measure: AskCompiler) -> None:
        self.device, self.measure = device, measure

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        kernels: dict[str, PrimFunc] = {}
        for gv, func in mod.functions_items():
            if isinstance(func, PrimFunc) and func.attrs and func.attrs.get(RKERNEL):
                kernels[gv.name_hint] = func
                del result[gv]
        plans = [from_json(SchedulePlan, str(text)) for text in mod.attrs[RTASK_PLANS]]
        made: dict[str, MergedKernel] = {}
        for number, plan in enumerate(plans):
            func, made[plan.symbol] = merge(plan, kernels, self.device, self.measure, number)
            result[ir.GlobalVar(plan.symbol)] = func
        record = from_json(RammerRecord, str(mod.attrs[RAMMER]))
        return result.with_attrs({RAMMER: to_json(_with_launches(record, made)), RTASK_PLANS: []})


def _with_launches(record: RammerRecord, made: Mapping[str, MergedKernel]) -> RammerRecord:
    regions = tuple(
        replace(region, launches=made[region.symbol].launches) if region.symbol else region for region in record.regions
    )
    return replace(record, regions=regions)


def merge(
    plan: SchedulePlan, kernels: Mapping[str, PrimFunc], device: DeviceSpec, measure: AskCompiler, number: int = 0
) -> tuple[PrimFunc, MergedKernel]:
    """The function of ``plan`` and what it takes; ``number`` tells its state from those of other plans."""
    merger = _Merger(plan, kernels, device, measure, number)
    for program in RTaskSchedule.from_json(plan.schedule).programs:
        merger.add(program)
    return merger.result()


class _Merger:
    """The launches of one plan, as they are added."""

    def __init__(
        self, plan: SchedulePlan, kernels: Mapping[str, PrimFunc], device: DeviceSpec, measure: AskCompiler, number: int
    ) -> None:
        self.plan, self.kernels, self.device, self.measure = plan, kernels, device, measure
        self.number = number
        self.operands = Operands(plan, kernels)
        self.launches: list[LaunchForm] = []
        self.records: list[MergedLaunch] = []
        self.words: list[int] = []
        self.state: list[int] = []

    def add(self, program: RTaskProgram) -> None:
        """The launches of ``program``, at the level that it can have."""
        operators = sorted({entry.operator for _, _, entry in program.entries()})
        waits = needed_waits(operators, self.plan.predecessors)
        if not any(waits.values()):
            self._add_waves(program, waits, "nothing in it waits")
        elif not blocks_may_wait(self.device):
            self._add_waves(program, waits, f"{self.device.name} has no acquiring loads")
        else:
            self._add_waiting(program, waits)

    def result(self) -> tuple[PrimFunc, MergedKernel]:
        func = self._function(self.launches, len(self.words), len(self.state))
        operands = self.operands
        record = MergedKernel(
            symbol=self.plan.symbol,
            launches=tuple(self.records),
            table=tuple(self.words),
            state=tuple(self.state) or (0,) * HEAD_WORDS,
            weights=operands.weights,
            weight_bytes=operands.weight_bytes,
            weight_dtype=operands.weight_dtype,
            arena_bytes=self.plan.arena_bytes,
            arena_dtype=operands.arena_dtype,
        )
        return func.with_attr(MERGED, to_json(record)), record

    # --- levels -------------------------------------------------------------------------------------------------------

    def _add_waves(self, program: RTaskProgram, waits: OperatorWaits, reason: str) -> None:
        for wave in waves_of(sorted(waits), waits):
            here = set(wave)
            entries = [entry for _, _, entry in program.entries() if entry.operator in here]
            entries.sort(key=lambda entry: (entry.operator, entry.begin))
            alone: OperatorWaits = dict.fromkeys(wave, ())
            launch = self._launch("waves", [[entry] for entry in entries], alone, len(entries))
            self._keep(launch, reason, None)

    def _add_waiting(self, program: RTaskProgram, waits: OperatorWaits) -> None:
        """Static streams where they are resident for certain, else tickets; waves where bodies spill for each other."""
        streams = [list(stream) for stream in program.streams if stream]
        order = in_one_order(program, waits)
        starts = list(accumulate(map(len, program.streams), initial=0))
        numbers = [starts[stream] + place for stream, place in order]
        static = self._launch("static", streams, waits, len(streams), program.device.veus_per_unit, numbers)
        use = self._measured(static)
        reason = use if isinstance(use, str) else self._obstacle(static, use)
        if not isinstance(use, str) and not reason:
            self._keep(static, f"{self._room(static, use)} blocks are resident", use)
            return
        ranked = [program.streams[stream][place] for stream, place in order]
        # One resident block is enough; saying so keeps ptxas from spilling for the sake of more.
        ticket = self._launch("ticket", [ranked], waits, min(len(order), len(streams)), 1)
        taken = self._measured(ticket)
        if isinstance(taken, CompiledUse) and taken.spill_bytes:
            self._add_waves(program, waits, f"{reason}; with tickets it would spill {taken.spill_bytes} bytes a thread")
            return
        self._keep(ticket, reason, taken)

    def _obstacle(self, launch: LaunchForm, use: CompiledUse) -> str:
        """Why its blocks are not all resident, or should not be; "" where they are."""
        if use.spill_bytes:
            return f"its streams would spill {use.spill_bytes} bytes a thread"
        room = self._room(launch, use)
        if room < launch.blocks:
            return f"{use.registers} registers leave room for {room} of {launch.blocks} blocks"
        return ""

    def _room(self, launch: LaunchForm, use: CompiledUse) -> int:
        shared = max(launch.shared_bytes, use.shared_bytes)
        block = BlockUse(threads=launch.threads, registers=use.registers, shared_bytes=shared)
        return blocks_per_unit(block, self.device) * self.device.unit_count

    def _measured(self, launch: LaunchForm) -> CompiledUse | str:
        words = launch.table
        return self.measure(self._function([launch], words.streams_at + len(words.words), 1 << 20))

    # --- launches -----------------------------------------------------------------------------------------------------

    def _launch(
        self,
        level: MergeLevel,
        streams: Streams,
        waits: OperatorWaits,
        blocks: int,
        least_resident: int = 0,
        order: Sequence[int] = (),
    ) -> LaunchForm:
        bodies = Bodies(self.plan, self.kernels, self.operands)
        kernel = {entry.operator: entry.kernel for stream in streams for entry in stream}
        codes = {operator: bodies.code(operator, kernel[operator]) for operator in sorted(kernel)}
        needs = [need_of(body.function) for body in bodies.found]
        shared_bytes = max(need.shared_bytes for need in needs)
        fits = shared_bytes <= static_shared_bytes(self.device)
        return LaunchForm(
            level=level,
            blocks=blocks,
            threads=max(need.threads for need in needs),
            shared_bytes=shared_bytes,
            shared_scope="shared" if fits else "shared.dyn",
            bodies=tuple(bodies.found),
            table=launch_table([self._tasks(stream) for stream in streams], codes, waits, len(self.words), order),
            state_at=len(self.state),
            least_resident=least_resident,
        )

    def _tasks(self, stream: Sequence[ScheduleEntry]) -> list[ScheduleEntry]:
        """``stream`` in rTasks that are single blocks of the rKernel."""
        found = []
        for entry in stream:
            code = self.plan.operators[entry.operator].codes[entry.kernel]
            begin, end = code.range_of(entry.begin, entry.end)
            found.append(replace(entry, begin=begin, end=end, waits=()))
        return found

    def _keep(self, launch: LaunchForm, reason: str, use: CompiledUse | str | None) -> None:
        table: LaunchTable = launch.table
        self.launches.append(launch)
        self.words += table.words
        if launch.level != "waves":
            mark = len(self.launches) + (self.number << 16)
            self.state += [0, mark, 0, NOT_CHOSEN, *[0] * (table.counters + launch.blocks)]
        self.records.append(
            MergedLaunch(
                level=launch.level,
                reason=reason,
                blocks=launch.blocks,
                threads=launch.threads,
                shared_bytes=launch.shared_bytes,
                bodies=len(launch.bodies),
                entries=table.entry_count,
                registers=use.registers if isinstance(use, CompiledUse) else None,
            )
        )

    def _function(self, launches: Sequence[LaunchForm], table_words: int, state_words: int) -> PrimFunc:
        table = flat_buffer(table_words, "int32", "table")
        state = flat_buffer(max(state_words, HEAD_WORDS), "int32", "state")
        statements: list[Stmt] = [launch_statement(launch, table, state) for launch in launches]
        func = PrimFunc(self.operands.parameters(table, state), sequence(*statements)).with_attrs(
            {"global_symbol": self.plan.symbol, "tirx.noalias": True, "s_tir": True, ALREADY_SCHEDULED: True}
        )
        return rename_apart(func.with_attr(MERGED, ""))
