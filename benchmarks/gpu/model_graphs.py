"""Whole models as cases of the bundle: code whose weights are inputs, and the graph as JSON for the references.

The weights of BERT base take 220 MB. A bundle has the mean and deviation of each instead, and draws it on the GPU. What
is drawn is what the kernels read: the graph is recorded after layouts were chosen, so that no weight is transposed at
run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from cases import Case, Tensor
from graph_references import OPERATOR

from tvm_ext import recorder, relay
from tvm_ext._tvm import Call, Constant, Expr, Var, copy_module, relax, structural_map, tvm
from tvm_ext.errors import IllegalRewrite, OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import graph_passes, kernel_passes, layout_passes, operator_passes, plan_build
from tvm_ext.records.rammer import RAMMER, RammerRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.reports.record import OperatorReport
from tvm_ext.toolchains.code_generation import generate_whole

LARGEST_VALUE = 16
"""Constants of more elements become parameters; the others are part of the graph."""

TOLERANCE = 2e-2
"""Of a model's half-precision outputs, relative by norm: ten times what BERT base errs by against ONNX Runtime."""

GROUP = "models"


class Grouped(Protocol):
    """A model of a group."""

    @property
    def group(self) -> str: ...


AnyModel = TypeVar("AnyModel", bound=Grouped)


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A case and the Relax module that it stands for, whose parameters are the case's inputs in order."""

    case: Case
    module: Any
    parameters: tuple[Any, ...]


def choose(
    cases: Sequence[Case], models: Mapping[str, AnyModel], only: Sequence[str]
) -> tuple[list[Case], dict[str, AnyModel]]:
    """What ``only`` names, by ids and groups; everything if it names nothing.

    Raises OptionError for a name of nothing: it would be missed on the other machine.
    """
    known = {*models, *(item.group for item in models.values())}
    known |= {name for case in cases for name in (case.id, case.group)}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise OptionError(f"no case is called {', '.join(unknown)}.", "see benchmarks/gpu/cases.py and models.py")
    chosen = [case for case in cases if not only or case.id in only or case.group in only]
    return chosen, {name: item for name, item in models.items() if not only or name in only or item.group in only}


def model_case(
    name: str, model: Any, device: str, below: Mapping[str, int], group: str = GROUP, tolerance: float = TOLERANCE
) -> ModelCase:
    """ONNX ``model``, laid out for ``device``; ``below`` bounds the integer inputs by name, exclusively.

    Raises IllegalRewrite for a graph with anything but calls of operators in it.
    """
    module, params = relay.frontend.from_onnx(model)
    plan = plan_build(device, BuildOptions())
    with plan.target:
        laid_out = tvm.transform.Sequential(
            [
                *graph_passes(),
                *layout_passes(plan.device, plan.options),
                relax.transform.FoldConstant(),
                relax.transform.CanonicalizeBindings(),
                relax.transform.DeadCodeElimination(),
            ]
        )(relay.prepare(module, params))
    lifted, drawn = lift_constants(laid_out)
    main = lifted["main"]
    given = [_input(var, below) for var in main.params[: len(main.params) - len(drawn)]]
    nodes, outputs = record_graph(_whole(lifted))
    case = Case(
        id=name, group=group, operator=OPERATOR, inputs=(*given, *drawn),
        output=_tensor(str(outputs[0]), _types(main.ret_ty)[0]), tolerance=tolerance,
        attributes={"nodes": nodes, "outputs": outputs},
    )  # fmt: skip
    return ModelCase(case=case, module=lifted, parameters=tuple(main.params))


def _whole(mod: Any) -> Any:
    """The main function with the steps of recurrent layers, which are functions of their own, in their places."""
    passes = [relax.transform.InlinePrivateFunctions(), relax.transform.CanonicalizeBindings()]
    return tvm.transform.Sequential(passes)(mod)["main"]


def _input(var: Any, below: Mapping[str, int]) -> Tensor:
    made = _tensor(var.name, var.ty)
    return Tensor(name=made.name, shape=made.shape, dtype=made.dtype, below=below.get(var.name, 0))


def _tensor(name: str, ty: Any, mean: float = 0.0, scale: float = 1.0) -> Tensor:
    return Tensor(name=name, shape=_shape(ty), dtype=str(ty.dtype), mean=mean, scale=scale)


def _shape(ty: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in ty.shape)


def _types(ty: Any) -> list[Any]:
    return list(ty.fields) if isinstance(ty, relax.TupleType) else [ty]


# --- constants as parameters --------------------------------------------------------------------------------------
def lift_constants(mod: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """``mod`` with large constants of ``main`` as further parameters, and what to draw for each."""
    made: dict[Any, Any] = {}
    drawn: list[Tensor] = []

    def lift(constant: Any) -> Any:
        array = constant.value.numpy()
        if array.size <= LARGEST_VALUE:
            return constant
        if constant.value not in made:
            name = f"p{len(made)}"
            made[constant.value] = relax.Var(name, constant.ty)
            drawn.append(_drawn(name, constant.ty, array))
        return made[constant.value]

    main = structural_map(mod["main"], (Constant, lift))
    function = relax.Function([*main.params, *made.values()], main.body, main.ret_ty, main.is_pure)
    result = copy_module(mod)
    result["main"] = function.with_attr("global_symbol", "main")
    return result, tuple(drawn)


def _drawn(name: str, ty: Any, array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind != "f":
        raise IllegalRewrite(f"constant {name} of type {array.dtype} and shape {array.shape} cannot be drawn at random")
    wide = array.astype("float64")
    return _tensor(name, ty, mean=float(f"{wide.mean():.6g}"), scale=float(f"{wide.std():.6g}"))


# --- the graph as JSON --------------------------------------------------------------------------------------------
def record_graph(main: Any) -> tuple[list[Any], list[str]]:
    """(nodes, outputs) as `graph_references` reads them."""
    nodes: list[Any] = []
    names: dict[Any, Any] = {var: var.name for var in main.params}
    tuples: dict[Any, list[str]] = {}
    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, Var | Constant):
                (names[binding.var],) = _arguments(value, names, tuples)
                continue
            if isinstance(value, relax.Tuple):
                tuples[binding.var] = [names[item] for item in value.fields]
                continue
            if not isinstance(value, Call | relax.TupleGetItem):
                raise IllegalRewrite(f"a graph with a {type(value).__name__} in it cannot be recorded")
            names[binding.var] = f"v{len(nodes)}"
            nodes.append([names[binding.var], *_node(value, names, tuples)])
    result = main.body.body
    return nodes, tuples[result] if result in tuples else [names[result]]


def _node(value: Any, names: Mapping[Any, Any], tuples: Mapping[Any, list[str]]) -> list[Any]:
    if isinstance(value, relax.TupleGetItem):
        return ["pick", [names[value.tuple_value]], {"index": int(value.index)}]
    operator = str(value.op.name).removeprefix("relax.")
    shapes = [item for item in value.args if isinstance(item, relax.ShapeExpr)]
    attributes = _ATTRIBUTES[operator](value.attrs) if operator in _ATTRIBUTES else {}
    if shapes:
        attributes["shape"] = [int(size) for size in shapes[0]]
    if operator == "strided_slice":
        attributes = {name: _numbers(item.fields) for name, item in zip(_SLICE, value.args[1:], strict=False)}
        attributes.setdefault("strides", [1] * len(attributes["axes"]))
        return [operator, [names[value.args[0]]], attributes]
    arguments = []
    for item in value.args:
        if not isinstance(item, relax.ShapeExpr):
            arguments += _arguments(item, names, tuples)
    return [operator, arguments, attributes]


_SLICE = ("axes", "begin", "end", "strides")
"""The operands of a slice behind its tensor, which are numbers."""


def _arguments(item: Any, names: Mapping[Any, Any], tuples: Mapping[Any, list[str]]) -> list[Any]:
    """An operand; of a tuple, its fields."""
    if item in tuples:
        return list(tuples[item])
    if isinstance(item, relax.Tuple):
        return [names[field] for field in item.fields]
    if isinstance(item, Constant):
        array = item.value.numpy()
        return [{"value": array.tolist(), "dtype": str(array.dtype)}]
    return [names[item]]


def _numbers(values: Any) -> list[int]:
    return [int(getattr(value, "value", value)) for value in values]


def _split(attrs: Any) -> dict[str, Any]:
    """In how many equal parts, or where; along which axis."""
    parts = attrs.indices_or_sections
    return {"parts": int(parts) if isinstance(parts, Expr | int) else _numbers(parts), "axis": int(attrs.axis)}


def _pool(attrs: Any) -> dict[str, Any]:
    if attrs.ceil_mode or any(size != 1 for size in attrs.dilation):
        raise IllegalRewrite("a pooling with ceil_mode or dilation cannot be recorded")
    fields = {name: _numbers(getattr(attrs, name)) for name in ("pool_size", "strides", "padding")}
    return {"layout": str(attrs.layout), **fields}


_ATTRIBUTES: dict[str, Any] = {
    "astype": lambda attrs: {"dtype": str(attrs.dtype)},
    "take": lambda attrs: {"axis": int(attrs.axis)},
    "permute_dims": lambda attrs: {"axes": _numbers(attrs.axes)},
    "expand_dims": lambda attrs: {"axis": _numbers(attrs.axis)},
    "nn.softmax": lambda attrs: {"axis": int(attrs.axis)},
    "nn.layer_norm": lambda attrs: {"epsilon": float(attrs.epsilon)},
    "nn.conv2d": lambda attrs: {
        "layouts": [str(attrs.data_layout), str(attrs.kernel_layout)],
        **{name: _numbers(getattr(attrs, name)) for name in ("strides", "padding", "dilation")},
        "groups": int(attrs.groups),
    },
    "nn.max_pool2d": _pool,
    "nn.avg_pool2d": _pool,
    "concat": lambda attrs: {"axis": int(attrs.axis)},
    "split": _split,
    "squeeze": lambda attrs: {"axis": _numbers(attrs.axis)},
}


# --- code ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class CompiledModel:
    """TVM's executable of a model, how its kernels were made, and which of them run in schedules, in words."""

    executable: Any
    operators: tuple[OperatorReport, ...]
    schedules: tuple[str, ...]


def compile_model(module: Any, device: str, options: BuildOptions) -> CompiledModel:
    """``module``, which is laid out already, built with ``options``."""
    plan = plan_build(device, options)
    passes = [*operator_passes(plan.target), *kernel_passes(plan.device, plan.options)]
    with plan.target:
        kernels = tvm.transform.Sequential(passes)(module)
        lowered = plan.lower(kernels)
        executable = generate_whole(lowered, plan.target).executable
    record = lowered.attrs[RAMMER] if lowered.attrs and RAMMER in lowered.attrs else None
    regions = from_json(RammerRecord, str(record)).regions if record is not None else ()
    return CompiledModel(
        executable=executable,
        operators=recorder.operators(kernels, plan, plan.options),
        schedules=tuple(map(str, regions)),
    )


def flops_of(operators: tuple[OperatorReport, ...]) -> float:
    return sum(item.calls * item.choice.flops for item in operators)
