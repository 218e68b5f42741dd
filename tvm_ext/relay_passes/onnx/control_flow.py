"""If, Loop and Scan as calls of Relax functions; branches and bodies are imported as models are.

A loop of n steps is a function that calls one of its first half and one of its second half, down to a single step.
Calls so nest log2(n) deep, where a function that calls itself nests n deep, and results of all steps have known shapes.
A step of a loop with a condition, and each half, is left out where the loop has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper

from tvm_ext._tvm import BlockBuilder, Call, Constant, Expr, GlobalVar, IRModule, RelaxFunction, Var, relax
from tvm_ext.errors import ModelError
from tvm_ext.support.tensors import array_over

from .control_values import (
    block,
    bound,
    changing,
    declared,
    extents,
    fields,
    known_extents,
    moved,
    nothing,
    require_equal,
    returning,
    scalar,
)
from .graph import OnnxGraph, array_from_tensor, attribute, captured_names, describe_node, fresh_name, is_standard
from .limit import check_extents

OPERATORS = ("If", "Loop", "Scan")
MOST_STEPS = 1 << 40
"""Steps of a loop whose number is not known when it is built."""

_MakeBody: TypeAlias = Callable[[BlockBuilder, Sequence[Expr], Mapping[str, Expr]], Expr]
"""Binds, in a function of a state and of what is read beside it, what the function gives."""

_SCALAR = (relax.TensorType((), "int64"), relax.TensorType((), "bool"))


class ControlFlowFailed(BaseException):
    """Carries an error of this module, or of a body, past the importers of the graphs around it."""

    def __init__(self, error: ModelError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Body:
    """A branch or body as a function of its inputs, then of ``reads`` of the scope around it."""

    function: GlobalVar
    reads: tuple[str, ...]
    types: tuple[Any, ...]  # of its outputs
    going_on: bool  # a loop's: whether the condition that a step gives is true if that of the step was

    def __call__(self, arguments: Sequence[Expr], values: Mapping[str, Expr]) -> Call:
        return Call(self.function, [*arguments, *(values[name] for name in self.reads)])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    """A loop: ``state`` are the types of what a step hands to the next, the first of them its number.

    ``step`` gives the next state and the results of one step; ``conditional``: the second of the state says whether to
    go on. ``reads`` are what steps read beside the state, by name.
    """

    name: str
    state: tuple[Any, ...]
    reads: Mapping[str, Any]
    results: int
    conditional: bool
    step: Callable[[BlockBuilder, Sequence[Expr], Mapping[str, Expr]], tuple[list[Expr], list[Expr]]]


@dataclass
class ControlFlow:
    """Converts control flow of ``graph`` and in its bodies; ``import_body`` gives a cleaned body and its function."""

    graph: OnnxGraph
    import_body: Callable[[OnnxGraph], tuple[OnnxGraph, RelaxFunction]]
    _made: BlockBuilder = field(default_factory=BlockBuilder)
    _names: set[str] = field(default_factory=set)

    def add_to(self, mod: IRModule) -> None:
        """Put the functions that calls name into ``mod``."""
        for variable, func in self._made.get().functions_items():
            mod[variable] = func

    def convert(self, builder: BlockBuilder, node: onnx.NodeProto, values: Mapping[str, Expr]) -> list[Expr]:
        """The outputs of ``node`` in the function under construction; ``values`` are those that it reads.

        Raises ControlFlowFailed where shapes are not known, or change from step to step or from branch to branch.
        """
        scan = self._scan_of_batch if self.graph.opset < 9 else self._scan
        kinds = {"If": self._if, "Loop": self._loop, "Scan": scan}
        try:
            return kinds[node.op_type](builder, node, {name: bound(builder, value) for name, value in values.items()})
        except ModelError as error:
            raise ControlFlowFailed(error) from None

    # --- If -----------------------------------------------------------------------------------------------------------
    def _if(self, builder: BlockBuilder, node: onnx.NodeProto, values: Mapping[str, Expr]) -> list[Expr]:
        condition = values[node.input[0]]
        then, other = (self._body(node, name, (), values) for name in ("then_branch", "else_branch"))
        outputs = len(then.types)
        if isinstance(condition, Constant):
            return fields(
                builder, builder.emit((then if array_over(condition.value).item() else other)((), values)), outputs
            )
        require_equal(node, "output", node.output, then.types, other.types, "in one branch", "in the other")
        reads = {name: values[name].ty for name in dict.fromkeys((*then.reads, *other.reads))}

        def chosen(inner: BlockBuilder, arguments: Sequence[Expr], inside: Mapping[str, Expr]) -> Expr:
            return relax.If(arguments[0], returning(then((), inside)), returning(other((), inside)))

        function = self._function(f"{node.name or 'if'}_choice", _SCALAR[1:], reads, chosen, dataflow=False)
        arguments = [scalar(builder, condition), *(values[name] for name in reads)]
        return fields(builder, builder.emit(Call(function, arguments)), outputs)

    # --- Loop and Scan ------------------------------------------------------------------------------------------------
    def _loop(self, builder: BlockBuilder, node: onnx.NodeProto, values: Mapping[str, Expr]) -> list[Expr]:
        trips, first = (values.get(name) for name in (*node.input[:2], "", "")[:2])
        carried = [values[name] for name in node.input[2:]]
        types = tuple(value.ty for value in carried)
        body = self._body(node, "body", (*_SCALAR, *types), values)
        require_equal(node, "carried value", node.input[2:], types, body.types[1:])
        known = int(array_over(trips.value).item()) if isinstance(trips, Constant) else None
        starts = first is None or (isinstance(first, Constant) and bool(array_over(first.value).item()))
        conditional = known is None or not (body.going_on and starts)
        count = max(0, MOST_STEPS if known is None else min(known, MOST_STEPS))
        if isinstance(first, Constant) and not array_over(first.value).item():
            count = 0
        rows = body.types[1 + len(types) :]
        if count == 0:
            return [*carried, *(nothing(kind) for kind in rows)]
        if rows and conditional:
            raise changing(
                node,
                f"output '{node.output[len(types)]}' has as many elements as the loop has steps, which is not known",
            )
        self._check_results(node, count, node.output[len(types) :], rows)
        reads = {name: values[name].ty for name in body.reads}
        limit = fresh_name("trips", {*reads}) if trips is not None and known is None else ""

        def step(
            inner: BlockBuilder, state: Sequence[Expr], inside: Mapping[str, Expr]
        ) -> tuple[list[Expr], list[Expr]]:
            given = state[2:] if conditional else state[1:]
            go_on = relax.const(True, "bool")
            outputs = fields(inner, inner.emit(body([state[0], go_on, *given], inside)), len(body.types))
            number = inner.emit(relax.op.add(state[0], relax.const(1, "int64")))
            more = [scalar(inner, outputs[0])] if conditional else []
            if limit:
                below = inner.emit(relax.op.less(number, inside[limit]))
                more = [inner.emit(relax.op.logical_and(more[0], below))]
            return [number, *more, *outputs[1 : 1 + len(types)]], outputs[1 + len(types) :]

        start: list[Expr] = [relax.const(0, "int64")]
        around = dict(values)
        if conditional:
            start.append(relax.const(True, "bool") if first is None else scalar(builder, first))
        if limit:
            around[limit] = scalar(builder, trips)
            reads[limit] = _SCALAR[0]
            any_step = builder.emit(relax.op.less(relax.const(0, "int64"), around[limit]))
            start[1] = builder.emit(relax.op.logical_and(start[1], any_step))
        steps = _Steps(
            name=node.name or "loop",
            state=(*(_SCALAR if conditional else _SCALAR[:1]), *types),
            reads=reads,
            results=len(rows),
            conditional=conditional,
            step=step,
        )
        return self._run(builder, steps, count, [*start, *carried], around)[1 + conditional :]

    def _scan_of_batch(self, builder: BlockBuilder, node: onnx.NodeProto, values: Mapping[str, Expr]) -> list[Expr]:
        """Scan of opset 8: states and inputs begin with a batch, whose elements are scanned one after the other."""
        if node.input[0]:
            raise ModelError(f"{describe_node(node)} has a length for each element", "export with opset 9 or newer")
        names, results = node.input[1:], []
        (size,) = {known_extents(node, name, values[name].ty)[0] for name in names}
        options = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        options |= {"scan_input_directions": ways} if (ways := options.pop("directions", None)) else {}
        for place in range(size):
            at = relax.const(place, "int64")
            parts = {f"{name} {place}": builder.emit(relax.op.take(values[name], at, 0, mode="wrap")) for name in names}
            single = helper.make_node("Scan", list(parts), node.output, f"{node.name or 'scan'}_{place}", **options)
            results.append(self._scan(builder, single, {**values, **parts}))
        rows = [[builder.emit(relax.op.expand_dims(value, 0)) for value in own] for own in zip(*results, strict=True)]
        return [builder.emit(relax.op.concat(own, 0)) for own in rows]

    def _scan(self, builder: BlockBuilder, node: onnx.NodeProto, values: Mapping[str, Expr]) -> list[Expr]:
        scanned = attribute(node, "num_scan_inputs", 0)
        states, inputs = [list(node.input)[part] for part in (slice(-scanned), slice(-scanned, None))]
        shapes = [known_extents(node, name, values[name].ty) for name in inputs]
        axes = [
            axis % len(shape)
            for axis, shape in zip(attribute(node, "scan_input_axes", [0] * scanned), shapes, strict=True)
        ]
        backward = attribute(node, "scan_input_directions", [0] * scanned)
        count = shapes[0][axes[0]]
        slices = [
            relax.TensorType([*shape[:axis], *shape[axis + 1 :]], values[name].ty.dtype)
            for name, shape, axis in zip(inputs, shapes, axes, strict=True)
        ]
        types = tuple(values[name].ty for name in states)
        body = self._body(node, "body", (*types, *slices), values)
        require_equal(node, "state", states, types, body.types)
        rows = body.types[len(types) :]
        self._check_results(node, count, node.output[len(types) :], rows)
        ways = attribute(node, "scan_output_directions", [0] * len(rows))
        places = attribute(node, "scan_output_axes", [0] * len(rows))
        reads = {name: values[name].ty for name in dict.fromkeys((*body.reads, *inputs))}

        def step(
            inner: BlockBuilder, state: Sequence[Expr], inside: Mapping[str, Expr]
        ) -> tuple[list[Expr], list[Expr]]:
            last = inner.emit(relax.op.subtract(relax.const(count - 1, "int64"), state[0]))
            parts = [
                inner.emit(relax.op.take(inside[name], last if way else state[0], axis, mode="wrap"))
                for name, axis, way in zip(inputs, axes, backward, strict=True)
            ]
            outputs = fields(inner, inner.emit(body([*state[1:], *parts], inside)), len(body.types))
            number = inner.emit(relax.op.add(state[0], relax.const(1, "int64")))
            return [number, *outputs[: len(types)]], outputs[len(types) :]

        steps = _Steps(
            name=node.name or "scan",
            state=(_SCALAR[0], *types),
            reads=reads,
            results=len(rows),
            conditional=False,
            step=step,
        )
        start = [relax.const(0, "int64"), *(values[name] for name in states)]
        if count == 0:
            return [*start[1:], *(nothing(kind) for kind in rows)]
        found = self._run(builder, steps, count, start, values)[1:]
        stacked = [
            builder.emit(relax.op.flip(value, 0)) if way else value
            for value, way in zip(found[len(types) :], ways, strict=True)
        ]
        return found[: len(types)] + [
            builder.emit(relax.op.permute_dims(value, moved(len(extents(value.ty)), axis))) if axis else value
            for value, axis in zip(stacked, places, strict=True)
        ]

    def _check_results(self, node: onnx.NodeProto, count: int, names: Sequence[str], rows: Sequence[Any]) -> None:
        """Raise ModelError where what ``count`` steps give is larger than a tensor may be."""
        for name, row in zip(names, rows, strict=False):
            shape = (count, *known_extents(node, name, row))
            check_extents(shape, f"output '{name}' of {describe_node(node)}", self.graph.limits)

    def _run(
        self, builder: BlockBuilder, steps: _Steps, count: int, start: Sequence[Expr], values: Mapping[str, Expr]
    ) -> list[Expr]:
        """The state after ``count`` steps, or fewer by its condition, then the results of all steps."""
        function = self._many(steps, count, {})
        return fields(
            builder,
            builder.emit(Call(function, [*start, *(values[name] for name in steps.reads)])),
            len(steps.state) + steps.results,
        )

    def _many(self, steps: _Steps, count: int, made: dict[int, GlobalVar]) -> GlobalVar:
        """The function of ``count`` steps; it gives the state back where a loop with a condition has ended."""
        if count not in made:
            run = self._one(steps) if count == 1 else self._halves(steps, count, made)

            def guarded(inner: BlockBuilder, state: Sequence[Expr], inside: Mapping[str, Expr]) -> Expr:
                going = block(inner, lambda: run(inner, state, inside))
                return relax.If(state[1], going, returning(relax.Tuple(state)))

            body, name = guarded if steps.conditional else run, f"{steps.name}_{count}_steps"
            made[count] = self._function(name, steps.state, steps.reads, body, dataflow=not steps.conditional)
        return made[count]

    def _one(self, steps: _Steps) -> _MakeBody:
        """A step: a function without branches where the loop has some, as kernels are fused in these alone."""

        def run(inner: BlockBuilder, state: Sequence[Expr], inside: Mapping[str, Expr]) -> Expr:
            following, results = steps.step(inner, state, inside)
            return relax.Tuple([*following, *(inner.emit(relax.op.expand_dims(own, 0)) for own in results)])

        if not steps.conditional:
            return run
        function = self._function(f"{steps.name}_step", steps.state, steps.reads, run)
        return lambda inner, state, inside: inner.emit(Call(function, [*state, *inside.values()]))

    def _halves(self, steps: _Steps, count: int, made: dict[int, GlobalVar]) -> _MakeBody:
        """Half of ``count`` steps behind the other half, their results joined."""
        halves = [self._many(steps, half, made) for half in (count - count // 2, count // 2)]
        width = len(steps.state)

        def run(inner: BlockBuilder, state: Sequence[Expr], inside: Mapping[str, Expr]) -> Expr:
            parts: list[list[Expr]] = []
            for half in halves:
                call = inner.emit(Call(half, [*state, *inside.values()]))
                found = fields(inner, call, width + steps.results)
                state, results = found[:width], found[width:]
                parts.append(results)
            joined = [inner.emit(relax.op.concat(pair, 0)) for pair in zip(*parts, strict=True)]
            return relax.Tuple([*state, *joined])

        return run

    # --- functions ----------------------------------------------------------------------------------------------------
    def _body(self, node: onnx.NodeProto, name: str, types: Sequence[Any], values: Mapping[str, Expr]) -> _Body:
        """The graph in attribute ``name`` of ``node``, whose inputs are of ``types``."""
        graph = attribute(node, name, None)
        reads = sorted(captured_names(graph))
        known = {name: array_over(values[name].value) for name in reads if isinstance(values[name], Constant)}
        read = tuple(name for name in reads if name not in known)
        names = [value.name for value in graph.input]
        inputs = [
            declared(node, name, kind)
            for name, kind in (*zip(names, types, strict=True), *((name, values[name].ty) for name in read))
        ]
        body = OnnxGraph(
            nodes=tuple(graph.node),
            inputs=tuple(inputs),
            outputs=tuple(
                helper.make_tensor_value_info(v.name, v.type.tensor_type.elem_type, None) for v in graph.output
            ),
            constants={**known, **{tensor.name: array_from_tensor(tensor) for tensor in graph.initializer}},
            opsets=self.graph.opsets,
            limits=self.graph.limits,
        )
        cleaned, func = self.import_body(body)
        function = self._made.add_func(func, self._name(f"{node.name or node.op_type.lower()}_{name}"))
        result = func.ret_ty
        return _Body(
            function=function,
            reads=read,
            types=(result,) if len(graph.output) == 1 else tuple(result.fields),
            going_on=node.op_type == "Loop" and _goes_on(cleaned),
        )

    def _function(
        self, name: str, types: Sequence[Any], reads: Mapping[str, Any], body: _MakeBody, *, dataflow: bool = True
    ) -> GlobalVar:
        """A function of values of ``types``, then of ``reads``, that gives what ``body`` makes of them."""
        state = [Var(f"state_{place}", kind) for place, kind in enumerate(types)]
        inside = {own: Var(own, kind) for own, kind in reads.items()}
        builder = BlockBuilder()
        with builder.function("made", [*state, *inside.values()], private=True):
            if dataflow:
                with builder.dataflow():
                    result = builder.emit_output(body(builder, state, inside))
            else:
                result = builder.emit(body(builder, state, inside))
            builder.emit_func_output(result)
        (func,) = (func for _, func in builder.get().functions_items())
        return self._made.add_func(func, self._name(name))

    def _name(self, stem: str) -> str:
        from .clean import as_identifier

        return fresh_name(as_identifier(stem), self._names)


def _goes_on(body: OnnxGraph) -> bool:
    """Whether the first output of a loop's body is true if its second input, the condition, is."""
    name, sources = (
        body.output_names[0],
        {node.output[0]: node.input[0] for node in body.nodes if is_standard(node, "Identity")},
    )
    while name in sources:
        name = sources[name]
    return name == body.input_names[1] or bool(body.constants.get(name, np.zeros(1)).item())
