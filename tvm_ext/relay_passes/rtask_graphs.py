"""Calls of split kernels as one graph of rTasks, and the tensors that its operators pass to each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from tvm_ext._tvm import CALL_TIR, Call, Constant, Expr, Var, VarBinding, relax
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.cost.schedule_simulator import simulate
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.rammer import STEP
from tvm_ext.records.rtask_split import ARENA, CopiedPiece, DataPlace, OperatorData, RTaskSplit
from tvm_ext.records.rtask_times import RTaskTimes
from tvm_ext.records.rtasks import ROperator, RTaskGraph, RTaskProgram, RTaskSchedule, ScheduleEntry, VDevice

from .rtask_kernels import TimedStep, offers_of, rkernels_of, timed_steps
from .rtask_memory import ALIGNMENT, in_order_of_data, place_values, spans_of

TensorPlace = int | tuple[int, ...]
"""What a variable stands for: a tensor of the region, or a tuple of them."""


@dataclass(slots=True, eq=False)
class RegionTensor:
    """A tensor that operators touch: an argument of the region, or in its arena where ``argument`` is None.

    ``writers`` are the operators that wrote it last, ``readers`` those that read it since. What lies ``within`` another
    tensor, so many bytes behind its start, has no memory of its own.
    """

    size_bytes: int
    argument: int | None = None
    is_constant: bool = False
    is_result: bool = False
    within: tuple[int, int] | None = None
    touched: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class RegionOperator:
    """A step of the call that ``variable`` is bound to, as constructed and by other kernels, with what they take."""

    name: str
    kernels: tuple[TimedStep, ...]
    tensors: tuple[int, ...]
    predecessors: tuple[int, ...]
    constants: str
    constant_bytes: int


class RTaskRegion:
    """Calls of kernels in their order, with views of their results, as operators over tensors.

    ``splits`` are those of the kernels that are called. What is read but not bound by ``bindings`` is an argument, and
    ``results`` are read behind the region. ``times`` were measured, and count more than the model's.

    A kernel that only copies pieces of one tensor, or pieces to one, becomes no operator on a CPU: the pieces lie
    within it. Worked example: the input's products of all steps of an LSTM are one tensor, and a step reads its rows.
    """

    def __init__(
        self,
        bindings: Sequence[VarBinding],
        results: Collection[Var],
        splits: Mapping[str, RTaskSplit],
        device: DeviceSpec,
        times: RTaskTimes | None = None,
    ) -> None:
        self.results = _sources(bindings, results)
        self.device, self.times = device, times
        self.arguments: list[Expr] = []
        self.tensors: list[RegionTensor] = []
        self.operators: list[RegionOperator] = []
        self.places: dict[Expr, TensorPlace] = {}
        for binding in bindings:
            value = binding.value
            if isinstance(value, relax.TupleGetItem):
                fields = self.places[value.tuple_value]
                assert isinstance(fields, tuple)
                self.places[binding.var] = fields[value.index]
            elif value.op == CALL_TIR:
                self._call(binding.var, value, splits[value.args[0].name_hint])
            else:
                self.places[binding.var] = self.places[value.args[0]]  # a view

    def tensor_of(self, variable: Var) -> int:
        """The place of the tensor that ``variable`` stands for."""
        place = self.places[variable]
        assert isinstance(place, int)
        return place

    def graph(self, *, with_variants: bool = True) -> RTaskGraph:
        """The operators for a policy, each with its rKernels from the finest to the coarsest.

        Those of variants come last; without them each kernel has the same number.
        """
        return RTaskGraph(
            operators=tuple(
                ROperator(
                    name=operator.name,
                    kernels=rkernels_of(
                        [item for item in offers_of(operator.kernels, self.device) if with_variants or not item.number],
                        operator.constant_bytes,
                        self.device,
                        self.times,
                    ),
                    predecessors=operator.predecessors,
                    constants=operator.constants,
                )
                for operator in self.operators
            )
        )

    @property
    def has_variants(self) -> bool:
        """Whether there is other code than the constructed kernels' for anything."""
        return any(len(operator.kernels) > 1 for operator in self.operators)

    def data(self, schedule: RTaskSchedule) -> tuple[tuple[OperatorData, ...], int]:
        """Each operator's code and data, and the bytes of the arena in which tensors lie that are no arguments.

        On a GPU, tensors share bytes only where data alone orders their uses: blocks may take entries in other orders.
        """
        inner = [
            number for number, tensor in enumerate(self.tensors) if tensor.argument is None and tensor.within is None
        ]
        if self.device.kind != "cpu":
            schedule = in_order_of_data([operator.predecessors for operator in self.operators])
        spans = spans_of(schedule, len(self.operators))
        touched: dict[int, list[int]] = {}
        for number, tensor in enumerate(self.tensors):
            touched.setdefault(self._whole(number)[0], []).extend(tensor.touched)
        offsets, arena_bytes = place_values(
            [self.tensors[number].size_bytes for number in inner], [touched[number] for number in inner], spans
        )
        offset_of = dict(zip(inner, offsets, strict=True))
        places = [self._data_place(number, offset_of) for number in range(len(self.tensors))]
        data = tuple(
            OperatorData(
                codes=tuple(offer.code for offer in offers_of(operator.kernels, self.device)),
                places=tuple(places[number] for number in operator.tensors),
            )
            for operator in self.operators
        )
        return data, arena_bytes

    def _data_place(self, number: int, offset_of: Mapping[int, int]) -> DataPlace:
        whole, offset = self._whole(number)
        argument, size_bytes = self.tensors[whole].argument, self.tensors[number].size_bytes
        if argument is None:
            return DataPlace(argument=ARENA, size_bytes=size_bytes, offset=offset_of[whole] + offset)
        return DataPlace(argument=argument, size_bytes=size_bytes, offset=offset)

    def _whole(self, number: int) -> tuple[int, int]:
        """The tensor whose memory ``number`` lies in, and how many bytes behind its start."""
        offset = 0
        while (within := self.tensors[number].within) is not None:
            number, offset = within[0], offset + within[1]
        return number, offset

    def _call(self, variable: Var, call: Call, split: RTaskSplit) -> None:
        kind = call.ty_args[0]
        results = list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]
        tensors = [self._argument(item) for item in call.args[1].fields]
        is_result = variable in self.results
        outputs = tuple(self._new(RegionTensor(bytes_of(result), is_result=is_result)) for result in results)
        self.places[variable] = outputs if isinstance(kind, relax.TupleType) else outputs[0]
        spaces = [self._new(RegionTensor(size)) for size in split.workspaces]
        all_tensors = [*tensors, *outputs, *spaces]
        assert len(tensors) + len(outputs) == split.param_count, call.args[0].name_hint
        if self._lay_within(split.pieces, all_tensors, set(outputs)):
            return
        for number, step in enumerate(split.steps):
            kernels = timed_steps(split, number, self.device)
            name = f"{call.args[0].name_hint}{STEP}{number}" if len(split.steps) > 1 else call.args[0].name_hint
            self._step(name, kernels, [all_tensors[buffer] for buffer in step.buffers])

    def _lay_within(self, pieces: Sequence[CopiedPiece], tensors: Sequence[int], written: Collection[int]) -> bool:
        """Whether copies of ``pieces`` between ``tensors`` need not be made: each lies in the whole from now on.

        Results need memory of their own, as do arguments, and what lies in another tensor already. A piece that begins
        within a line of the cache is copied: two vEUs would write the same line.
        """
        wholes, parts = {tensors[piece.whole] for piece in pieces}, [tensors[piece.piece] for piece in pieces]
        fresh = all(self._has_own_memory(part) for part in parts) and len({*parts, *wholes}) == len(parts) + 1
        if self.device.kind != "cpu" or not fresh or any(piece.offset_bytes % ALIGNMENT for piece in pieces):
            return False
        for piece, part in zip(pieces, parts, strict=True):
            whole, tensor = self.tensors[tensors[piece.whole]], self.tensors[part]
            tensor.within = tensors[piece.whole], piece.offset_bytes
            if part in written:
                tensor.writers = list(whole.writers)
            else:
                whole.writers = sorted({*whole.writers, *tensor.writers})
        return True

    def _has_own_memory(self, number: int) -> bool:
        tensor = self.tensors[number]
        return tensor.argument is None and tensor.within is None and not tensor.is_result

    def _step(self, name: str, kernels: tuple[TimedStep, ...], used: Sequence[int]) -> None:
        this, step = len(self.operators), kernels[0].step
        tensors = dict(zip(step.buffers, used, strict=True))
        needed: set[int] = set()
        for item in step.reads:
            tensor = self.tensors[tensors[item]]
            needed |= set(tensor.writers)
            tensor.readers.append(this)
        for item in step.writes:
            tensor = self.tensors[tensors[item]]
            needed |= {*tensor.writers, *tensor.readers}
            tensor.writers, tensor.readers = [this], []
        for number in used:
            self.tensors[number].touched.append(this)
        constants = [number for number in used if self.tensors[number].is_constant]
        self.operators.append(
            RegionOperator(
                name=name,
                kernels=kernels,
                tensors=tuple(used),
                predecessors=tuple(sorted(needed - {this})),
                constants=" ".join(map(str, constants)),
                constant_bytes=sum(self.tensors[number].size_bytes for number in constants),
            )
        )

    def _argument(self, expr: Expr) -> int:
        if expr not in self.places:
            tensor = RegionTensor(bytes_of(expr.ty), len(self.arguments), isinstance(expr, Constant))
            self.arguments.append(expr)
            self.places[expr] = self._new(tensor)
        place = self.places[expr]
        assert isinstance(place, int)
        return place

    def _new(self, tensor: RegionTensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _sources(bindings: Sequence[VarBinding], results: Collection[Var]) -> set[Var]:
    """``results``, and the variables of which they are views or fields."""
    found = set(results)
    for binding in reversed(bindings):
        value = binding.value
        if binding.var in found and isinstance(value, relax.TupleGetItem):
            found.add(value.tuple_value)
        elif binding.var in found and value.op != CALL_TIR:
            found.add(value.args[0])
    return found


def sequential_seconds(graph: RTaskGraph, device: VDevice) -> float:
    """The model's time of the operators one after another, each as fine as it is offered; those of several rTasks fork.

    By the simulator, so that constants stay in caches as they do in a schedule.
    """
    idle = replace(device, launch_s=0.0, task_overhead_s=0.0, barrier_s=0.0)
    streams: list[list[ScheduleEntry]] = [[] for _ in range(device.veu_count)]
    forks = 0
    for position, operator in enumerate(graph.operators):
        waits = tuple((unit, len(stream)) for unit, stream in enumerate(streams) if stream)
        count = operator.kernels[0].task_count
        for unit in range(count):
            streams[unit].append(ScheduleEntry(operator=position, kernel=0, begin=unit, end=unit + 1, waits=waits))
        forks += count > 1
    program = RTaskProgram(device=idle, streams=tuple(map(tuple, streams)))
    times = simulate(RTaskSchedule(policy="in order", programs=(program,)), graph)
    return times.makespan_s + forks * device.launch_s


def is_static(kind: Expr) -> bool:
    """Whether ``kind`` is the type of a tensor whose shape and elements are known."""
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        return False
    return all(hasattr(extent, "value") for extent in kind.shape.values) and bool(str(kind.dtype))


def bytes_of(kind: Expr) -> int:
    """The bytes of a tensor of static type ``kind``."""
    return int(itemsize_bytes(str(kind.dtype)) * prod(int(extent) for extent in kind.shape.values))
