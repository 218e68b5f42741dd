"""The table of a region of a graph: the schedule's rTasks become ranges of iterations of rKernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm_ext.records.rammer import SchedulePlan
from tvm_ext.records.rtask_split import ARENA, DataPlace, KernelCode
from tvm_ext.records.rtasks import RTaskProgram, RTaskSchedule, ScheduleEntry

from .native import make_module
from .table import Argument, Buffer, Call, Entry, ExecutionTable, Kernel, Parameter, one_after_another

if TYPE_CHECKING:
    from tvm_ext._tvm import Module


def with_schedules(library: Module, plans: Sequence[SchedulePlan]) -> Module:
    """A module that has, beside the kernels of ``library``, a function for each of ``plans``.

    Each schedule's module imports the next one, the last one ``library``: what is asked for is found in a chain.
    """
    for plan in plans:
        library = make_module(region_table(plan), [library])
    return library


def region_table(plan: SchedulePlan) -> ExecutionTable:
    """What the native runtime walks for ``plan``."""
    return _Writer(plan).table()


class _Writer:
    """Numbers what the schedule uses: kernels by function, buffers by place, calls by operator and function."""

    def __init__(self, plan: SchedulePlan) -> None:
        self.plan = plan
        self.kernels: dict[str, tuple[int, Kernel]] = {}
        self.buffers: dict[DataPlace, int] = {}
        self.calls: dict[tuple[int, str], tuple[int, Call]] = {}

    def table(self) -> ExecutionTable:
        plan = self.plan
        schedule = RTaskSchedule.from_json(plan.schedule)
        streams = one_after_another([self._program(program) for program in schedule.programs])
        return ExecutionTable(
            name=plan.symbol,
            arena_bytes=plan.arena_bytes,
            arguments=tuple(
                Argument(bytes=argument.size_bytes, alignment=argument.alignment) for argument in plan.arguments
            ),
            kernels=tuple(kernel for _, kernel in self.kernels.values()),
            buffers=tuple(_buffer(buffer) for buffer in self.buffers),
            calls=tuple(call for _, call in self.calls.values()),
            streams=streams,
        )

    def _program(self, program: RTaskProgram) -> list[list[Entry]]:
        return [[self._entry(entry) for entry in stream] for stream in program.streams]

    def _entry(self, entry: ScheduleEntry) -> Entry:
        code = self.plan.operators[entry.operator].codes[entry.kernel]
        begin, end = code.range_of(entry.begin, entry.end)
        return Entry(call=self._call(entry.operator, code), begin=begin, end=end, waits=entry.waits)

    def _call(self, operator: int, code: KernelCode) -> int:
        key = (operator, code.function)
        if key not in self.calls:
            places = self.plan.operators[operator].places
            buffers = tuple(self.buffers.setdefault(place, len(self.buffers)) for place in places)
            call = Call(name=self.plan.names[operator], kernel=self._kernel(code, places), buffers=buffers)
            self.calls[key] = (len(self.calls), call)
        return self.calls[key][0]

    def _kernel(self, code: KernelCode, places: tuple[DataPlace, ...]) -> int:
        if code.function not in self.kernels:
            parameters = tuple(
                Parameter(bytes=place.size_bytes, alignment=alignment)
                for place, alignment in zip(places, code.alignments, strict=True)
            )
            kernel = Kernel(symbol=code.function, tasks=code.iterations, parameters=parameters)
            self.kernels[code.function] = (len(self.kernels), kernel)
        return self.kernels[code.function][0]


def _buffer(place: DataPlace) -> Buffer:
    argument = None if place.argument == ARENA else place.argument
    return Buffer(argument=argument, offset=place.offset, bytes=place.size_bytes)
