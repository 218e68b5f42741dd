"""Stock TVM's ONNX importer with converters of ours, which names every value after the node that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import onnx

from tvm_ext._tvm import IMPORT_ERRORS, BlockBuilder, Call, Expr, IRModule, OnnxConverter, Var, onnx_frontend, relax
from tvm_ext.errors import TvmExtError

from .control_flow import OPERATORS, ControlFlow
from .graph import is_standard, read_names


class _ConversionFailed(BaseException):
    """Carries an operator's error past the stock importer, which would print the operands to the standard output."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _NamingBuilder(BlockBuilder):  # type: ignore[misc]
    """Names what a converter binds after the node that it converts, if ``name`` says how."""

    name = ""

    def emit(self, expr: Expr, name_hint: str = "") -> Var:
        return super().emit(expr, name_hint or self.name)

    def emit_output(self, output: Expr, name_hint: str = "") -> Var:
        return super().emit_output(output, name_hint or str(getattr(output, "name", "")))


def _named(builder: _NamingBuilder, value: Expr) -> Expr:
    """``value``, bound to a variable with the name of its node where it is a call that gives tensors."""
    value = builder.normalize(value) if isinstance(value, Expr) else value
    is_tensor = isinstance(value, Call) and isinstance(value.ty, relax.TensorType | relax.TupleType)
    return builder.emit(value) if builder.name and is_tensor else value


def import_onnx_with(
    model: onnx.ModelProto,
    shapes: Mapping[str, Sequence[Expr | int]],
    converters: Mapping[str, OnnxConverter],
    name_of: Callable[[int], str],
    control: ControlFlow,
) -> IRModule:
    """The module of ``model``; operators in `converters` are converted by those instead of by stock TVM, those of
    `control_flow.OPERATORS` by ``control``.

    `shapes`: input name -> extents. `converters`: operator name -> (builder, operands, attributes, opset) -> result.
    `name_of`: what to call the variable of the result of a node of the main graph, by its place there.
    Raises what converters raise. For the holder of `EXCLUSIVE`.
    """
    stock = onnx_frontend()

    class Importer(stock.ONNXGraphImporter):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(shapes, None)
            self.bb = _NamingBuilder()

        def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
            """Checked before: stock's knows nothing of `converters`."""

        def _construct_nodes(self, _signature: SimpleNamespace) -> None:
            for place, node in enumerate(model.graph.node):
                self.bb.name = name_of(place)
                if is_standard(node, *OPERATORS):
                    made = control.convert(self.bb, node, self._values(node))
                    self._nodes |= {name: value for name, value in zip(node.output, made, strict=False) if name}
                else:
                    super()._construct_nodes(SimpleNamespace(node=[node]))

        def _values(self, node: onnx.NodeProto) -> dict[str, Expr]:
            return {name: self._nodes[name] for name in read_names(node)}

        def _convert_operator(self, op_name: str, inputs: Sequence[Expr], attrs: Mapping[str, Any], opset: int) -> Expr:
            try:
                if op_name in converters:
                    found = converters[op_name](self.bb, inputs, attrs, opset)
                else:
                    converter = stock._get_convert_map()[op_name].get_converter(opset)
                    found = converter(self.bb, inputs, attrs, [self._nodes, self._params])
                if isinstance(found, relax.Tuple):
                    found = relax.Tuple([_named(self.bb, field) for field in found.fields])
                return _named(self.bb, found)
            except (*IMPORT_ERRORS, MemoryError, TvmExtError) as error:
                raise _ConversionFailed(error) from None

    opset = max((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), default=1)
    try:
        # Without its nodes: a function that has an If gets no dataflow block from stock, in which operators are fused.
        own = model.graph
        signature = SimpleNamespace(node=(), input=own.input, output=own.output, initializer=own.initializer)
        return Importer().from_onnx(signature, opset)
    except _ConversionFailed as failed:
        raise failed.error.with_traceback(failed.__traceback__) from failed.error.__cause__
