"""A program of torch.export as a Relax module, node by node: by our rules, else by those of the stock importer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from tvm_ext import _tvm
from tvm_ext._tvm import BlockBuilder, Expr, IRModule, Tensor, Var, relax
from tvm_ext.errors import InputError, ModelError, TvmExtError

from ..onnx.import_model import ORIGINAL_NAMES, OUTPUT_NAMES
from . import elementwise, reductions, shapes, weighted  # noqa: F401 (their rows)
from .fold_norms import fold_norms
from .nodes import (
    can_evaluate,
    dtype_name,
    is_number,
    name_of,
    require_torch,
    schema_operands,
    tensor_over_torch,
    tensors_in,
    where,
)
from .pen import RULES, TorchPen
from .stock import TRUSTED, kept_operators

_CHECKS = ("_assert", "sym_constrain")
"""Operators without a result, which check what the export has found out."""
_MOST_KNOWN = 1 << 20
"""Elements of a tensor that torch computes at import, from what it makes without operands. A choice."""


def import_program(
    program: Any, shape: Mapping[str, Sequence[int | None]] | None = None, names: Mapping[str, str] | None = None
) -> tuple[IRModule, dict[str, Tensor]]:
    """Imports a ``torch.export.ExportedProgram`` for inference.

    ``shape`` binds open dimensions, by input name; ``names`` is what a file calls inputs, by those names. Parameters,
    buffers and constants are the module's parameters, in torch's own memory where they lie there in row-major order.

    Raises UnsupportedEnvironmentError where torch is not installed; InputError where ``program`` is none, or ``shape``
    does not fit it, or leaves a dimension open; ModelError where operators cannot be imported (all listed, each with a
    node), or a result would not be torch's in shape or dtype.
    """
    torch = require_torch("programs of torch.export")
    if not isinstance(program, torch.export.ExportedProgram):
        raise InputError(
            f"{type(program).__name__} is no torch.export.ExportedProgram.",
            "export the module first: torch.export.export(module.eval(), (example_input, ...))",
        )
    return _Import(_decomposed(program), shape or {}).run(names or {})


def _decomposed(program: Any) -> Any:
    import torch

    table = torch.export.default_decompositions()
    for packet, overload in kept_operators():
        table.pop(getattr(getattr(torch.ops.aten, packet), overload), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own types
        return program.run_decompositions(table)


class _Import:
    """One import: what is known of each node, and the module under construction."""

    def __init__(self, program: Any, shape: Mapping[str, Sequence[int | None]]) -> None:
        self.program = program
        self.graph = program.graph
        self.state = self._state()
        self.inputs = self._inputs()
        self.sizes = self._sizes(shape)
        fold_norms(self.graph, self.state)
        self.known: dict[Any, Any] = {}  # node -> the torch tensor, or the number, that it is
        self.env: dict[Any, Any] = {}
        self.tensors: dict[int, Any] = {}  # id of an expression -> the torch tensor that it stands for
        self.parameters: dict[str, tuple[Var, Any]] = {}
        self.builder = BlockBuilder()
        self.importer = _stock_importer(self.builder)

    def run(self, names: Mapping[str, str]) -> tuple[IRModule, dict[str, Tensor]]:
        self._refuse_unknown()
        for node in self.inputs:
            value = node.meta["val"]
            self.env[node] = Var(node.name, relax.TensorType(self._shape(value), dtype_name(value)))
        arguments = [self.env[node] for node in self.inputs]
        with self.builder.function("main"):
            with self.builder.dataflow():
                for node in self.graph.nodes:
                    if node.op == "call_function":
                        self._convert(node)
                results = [self._expression(value) for value in self._outputs()]
                output = self.builder.emit_output(results[0] if len(results) == 1 else relax.Tuple(results))
            # Parameters are known by now: those that something reads.
            self.builder.emit_func_output(output, [*arguments, *(var for var, _ in self.parameters.values())])
        mod = self.builder.get()  # cells of recurrent layers are functions beside main
        attributes = {"num_input": len(arguments), ORIGINAL_NAMES: dict(names), OUTPUT_NAMES: self._output_names()}
        mod["main"] = mod["main"].with_attrs(attributes)
        return mod, {name: tensor_over_torch(value) for name, (_, value) in self.parameters.items()}

    # --- the signature ------------------------------------------------------------------------------------------
    def _state(self) -> dict[str, Any]:
        kinds, program, found = _input_kinds(), self.program, {}
        for spec in program.graph_signature.input_specs:
            if spec.kind in (kinds.PARAMETER, kinds.BUFFER, kinds.CONSTANT_TENSOR):
                held = program.state_dict.get(spec.target)
                found[spec.arg.name] = program.constants[spec.target] if held is None else held
            elif spec.kind is not kinds.USER_INPUT:
                raise ModelError(
                    f"the program's argument '{spec.arg.name}' is a {spec.kind.name}", "export tensors only"
                )
        return found

    def _inputs(self) -> list[Any]:
        import torch

        return [
            node
            for node in self.graph.nodes
            if node.op == "placeholder"
            and node.name not in self.state
            and isinstance(node.meta.get("val"), torch.Tensor)
        ]

    def _sizes(self, shape: Mapping[str, Sequence[int | None]]) -> dict[Any, int]:
        """The size of each open dimension's symbol."""
        names = [node.name for node in self.inputs]
        if unknown := [name for name in shape if name not in names]:
            raise InputError(f"the program has no input '{unknown[0]}'.", f"its inputs are {', '.join(names)}")
        sizes: dict[Any, int] = {}
        for node in self.inputs:
            dims, given = tuple(node.meta["val"].shape), shape.get(node.name)
            if given is not None and len(given) != len(dims):
                raise InputError(
                    f"shape {tuple(given)} of input '{node.name}' has not the rank {len(dims)}.", "give each extent"
                )
            for axis, (dim, size) in enumerate(zip(dims, given or [None] * len(dims), strict=True)):
                self._settle(f"dimension {axis} of input '{node.name}'", dim, size, sizes)
        for node in self.inputs:
            if open_ := [str(dim) for dim in node.meta["val"].shape if not self._is_bound(dim, sizes)]:
                raise InputError(
                    f"dimension {', '.join(open_)} of input '{node.name}' has no value.",
                    f"bind it when importing: shape={{'{node.name}': [...]}}",
                )
        return sizes

    def _settle(self, what: str, dim: Any, size: int | None, sizes: dict[Any, int]) -> None:
        expression = getattr(getattr(dim, "node", None), "expr", None)
        if size is None or (expression is not None and not expression.is_Symbol):
            return
        if expression is None:
            if int(dim) != size:
                raise InputError(f"{what} is {dim}, not {size}.", "export the program with that dimension open")
            return
        limits = self.program.range_constraints.get(expression)
        if sizes.setdefault(expression, size) != size or (
            limits is not None and not limits.lower <= size <= limits.upper
        ):
            raise InputError(f"{what} cannot be {size}.", "other inputs, or the program's own limits, say otherwise")

    @staticmethod
    def _is_bound(dim: Any, sizes: Mapping[Any, int]) -> bool:
        expression = getattr(getattr(dim, "node", None), "expr", None)
        return expression is None or not expression.subs(sizes).free_symbols

    def _shape(self, value: Any) -> list[int]:
        return [self._number(dim) for dim in value.shape]

    def _number(self, value: Any) -> Any:
        """A number of torch, with the sizes of open dimensions."""
        expression = getattr(getattr(value, "node", None), "expr", None)
        if expression is None:
            return value
        settled = expression.subs(self.sizes)
        if settled.free_symbols:
            raise ModelError(
                f"a size, {settled}, is known only at run time", "export without shapes that depend on values"
            )
        kind = {"SymInt": int, "SymFloat": float, "SymBool": bool}[type(value).__name__]
        return kind(settled)

    def _outputs(self) -> list[Any]:
        """What the user's function returns: programs also return the buffers that they write."""
        kinds = _output_kinds()
        specs = self.program.graph_signature.output_specs
        values = next(node for node in self.graph.nodes if node.op == "output").args[0]
        if changed := [spec.target for spec in specs if spec.kind not in (kinds.USER_OUTPUT, kinds.LOSS_OUTPUT)]:
            raise ModelError(
                f"the program writes {changed[0]!r} when it runs", "export a module in eval mode, without caches"
            )
        return [value for value in values if value is not None]

    def _output_names(self) -> list[str]:
        return [str(getattr(value, "name", f"output_{index}")) for index, value in enumerate(self._outputs())]

    # --- nodes --------------------------------------------------------------------------------------------------
    def _refuse_unknown(self) -> None:
        unknown: dict[str, str] = {}
        evaluated: set[Any] = set()
        for node in self.graph.nodes:
            if is_number(node) or (can_evaluate(node) and evaluated.issuperset(node.all_input_nodes)):
                evaluated.add(node)
            elif node.op == "get_attr" or (node.op == "call_function" and not self._is_convertible(node)):
                unknown.setdefault(name_of(node), where(node))
        if unknown:
            listed = ", ".join(f"{name} (node {where})" for name, where in unknown.items())
            raise ModelError(f"{len(unknown)} operator(s) of the program have no conversion: {listed}", "replace them")

    def _is_convertible(self, node: Any) -> bool:
        name = name_of(node)
        return name in RULES or name in TRUSTED or (node.meta.get("val") is None and name.startswith(_CHECKS))

    def _convert(self, node: Any) -> None:
        if node.meta.get("val") is None:
            return  # one of `_CHECKS`
        if is_number(node):
            self.known[node] = self._number(node.meta["val"])
        elif self._evaluated(node):
            return
        else:
            self.env[node] = self._checked(node, self._converted(node))

    def _evaluated(self, node: Any) -> bool:
        """Whether torch has computed the node, from nothing or from what it has computed: masks, ranges."""
        import torch

        if not can_evaluate(node) or any(operand not in self.known for operand in node.all_input_nodes):
            return False
        if sum(prod(self._shape(item)) for item in tensors_in(node.meta["val"])) > _MOST_KNOWN:
            return False
        args, kwargs = (
            torch.fx.node.map_arg(given, lambda operand: self.known[operand]) for given in (node.args, node.kwargs)
        )
        with torch.no_grad():
            self.known[node] = node.target(*args, **{**kwargs, **({"device": "cpu"} if kwargs.get("device") else {})})
        return True

    def _converted(self, node: Any) -> Any:
        name = name_of(node)
        try:
            if name in RULES:
                result = RULES[name](self._pen(node))
                return self.builder.normalize(result) if isinstance(result, Expr) else result
            if name not in TRUSTED:  # torch evaluates it, but for its size
                raise ModelError(f"operator '{name}' at {where(node)} makes a large tensor", "make it a buffer")
            for operand in node.all_input_nodes:
                self.importer.env[operand] = self.known[operand] if is_number(operand) else self._expression(operand)
            return self.importer.convert_map[name](node)
        except TvmExtError:
            raise
        except _tvm.IMPORT_ERRORS as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ModelError(
                f"operator '{name}' at {where(node)} cannot be converted: {reason.strip()}", "export it differently"
            ) from error

    def _pen(self, node: Any) -> TorchPen:
        results = tensors_in(node.meta["val"])
        return TorchPen(
            name=name_of(node),
            where=node.name,
            operands=tuple(self._operand(value) for value in schema_operands(node)),
            shapes=tuple(tuple(self._shape(item)) for item in results),
            dtypes=tuple(dtype_name(item) for item in results),
            builder=self.builder,
            state=lambda expression: self.tensors.get(id(expression)),
            parameter=self._parameter,
        )

    def _operand(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.fx.Node):
            return self.known[value] if is_number(value) else self._expression(value)
        if isinstance(value, list | tuple):
            return [self._operand(item) for item in value]
        return value

    def _expression(self, value: Any) -> Any:
        """What stands for a node: a parameter and a constant are made when something reads them."""
        if value not in self.env:
            if value in self.known:
                self.env[value] = self._constant(self.known[value])
            elif getattr(value, "name", None) in self.state:
                self.env[value] = self._parameter(value.name, self.state[value.name])
            else:
                raise ModelError(f"the program returns or reads {value!r}, which is no tensor", "return tensors only")
        return self.env[value]

    def _constant(self, tensor: Any) -> Any:
        if isinstance(tensor, list | tuple):
            return [self._constant(item) for item in tensor]
        made = relax.const(tensor_over_torch(tensor), dtype_name(tensor))
        self.tensors[id(made)] = tensor
        return made

    def _parameter(self, name: str, tensor: Any) -> Expr:
        var = Var(name, relax.TensorType(list(tensor.shape), dtype_name(tensor)))
        self.parameters[name] = (var, tensor)
        self.tensors[id(var)] = tensor
        return var

    def _checked(self, node: Any, result: Any) -> Any:
        """``result``, where each of its tensors has the shape and the dtype that torch gives it."""
        wanted = tensors_in(node.meta["val"])
        fields = result.ty.fields if isinstance(result, Expr) and isinstance(result.ty, relax.TupleType) else None
        if fields is None:
            fields = [getattr(item, "ty", None) for item in ([result] if isinstance(result, Expr) else result)]
        for type_, value in zip(fields, wanted, strict=True):
            if type_ is None:
                continue
            shape = type_.shape
            found = None if shape is None else [int(extent) for extent in shape]
            if found != self._shape(value) or str(type_.dtype) != dtype_name(value):
                raise ModelError(
                    f"operator '{name_of(node)}' at {where(node)} would have {type_.dtype} {found}, where torch has "
                    f"{dtype_name(value)} {self._shape(value)}",
                    "export it differently",
                )
        return result


def _stock_importer(builder: BlockBuilder) -> Any:
    """Stock TVM's importer: ``convert_map`` has its conversions by operator, which read operands from ``env``."""
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    importer = ExportedProgramImporter()
    importer.block_builder = builder
    return importer


def _input_kinds() -> Any:
    from torch.export.graph_signature import InputKind

    return InputKind


def _output_kinds() -> Any:
    from torch.export.graph_signature import OutputKind

    return OutputKind
