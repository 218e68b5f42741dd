"""The function of a recurrent cell: plain operators, called once per step, so that a long sequence is a small graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm_ext._tvm import BlockBuilder, Expr, Node, RelaxFunction, Var, relax
from tvm_ext.records.recurrent import CELL, ActivationName, GateActivation, RecurrentCell
from tvm_ext.records.serialise import to_json


def cell_function(cell: RecurrentCell) -> RelaxFunction:
    """A private function with attribute `CELL` that computes ``cell``; its parameters are ``cell.operands``."""
    builder = BlockBuilder()
    params = [Var(operand.name, relax.TensorType(operand.shape, operand.dtype)) for operand in cell.operands]
    with builder.function("cell", params, attrs={CELL: to_json(cell)}, private=True):
        with builder.dataflow():
            results = _WRITERS[cell.kind](_Step(builder, cell), {param.name: param for param in params})
            output = builder.emit_output(results[0] if len(results) == 1 else relax.Tuple(results))
        builder.emit_func_output(output)
    return builder.get()["cell"]


def is_cell(func: Node) -> bool:
    """Whether a function of the module is a recurrent cell that still is a graph."""
    return isinstance(func, RelaxFunction) and bool(func.attrs) and CELL in func.attrs


class _Step:
    """Emits the arithmetic of one step."""

    def __init__(self, builder: BlockBuilder, cell: RecurrentCell) -> None:
        self.builder, self.cell = builder, cell

    def add(self, *terms: Expr) -> Expr:
        total = terms[0]
        for term in terms[1:]:
            total = self.builder.emit(relax.op.add(total, term))
        return total

    def multiply(self, a: Expr, b: Expr) -> Expr:
        return self.builder.emit(relax.op.multiply(a, b))

    def product(self, rows: Expr, matrix: Expr) -> Expr:
        return self.builder.emit(relax.op.matmul(rows, matrix))

    def one_minus(self, x: Expr) -> Expr:
        return self.builder.emit(relax.op.subtract(relax.const(1.0, self.cell.dtype), x))

    def gate(self, x: Expr, index: int, count: int = 1) -> Expr:
        """The columns of ``count`` gates, the first of them number ``index``."""
        units = self.cell.hidden_size
        if index == 0 and int(x.ty.shape[1]) == count * units:
            return x
        return self.builder.emit(relax.op.strided_slice(x, [1], [index * units], [(index + count) * units]))

    def activate(self, x: Expr, index: int) -> Expr:
        """Activation number ``index`` of ``x``; sums of products are clipped before."""
        if self.cell.clip is not None and index < 2:
            x = self.builder.emit(relax.op.clip(x, -self.cell.clip, self.cell.clip))
        return activated(self.builder, x, self.cell.activations[index], self.cell.dtype)

    def masked(self, new: Expr, old: Expr, operands: Mapping[str, Expr]) -> Expr:
        if not self.cell.is_masked:
            return new
        return self.builder.emit(relax.op.where(operands["active"], new, old))


_Operands = Mapping[str, Expr]
_INPUT, _OUTPUT, _FORGET, _CELL = range(4)  # the order of gates and of peepholes (ONNX, LSTM)
_PEEPHOLES = {_INPUT: 0, _OUTPUT: 1, _FORGET: 2}  # likewise


def _lstm(step: _Step, operands: _Operands) -> list[Expr]:
    old = operands["cell"]
    sums = step.add(operands["inputs"], step.product(operands["hidden"], operands["recurrent"]))

    def gate(index: int, state: Expr) -> Expr:
        part = step.gate(sums, index)
        if step.cell.has_peepholes:
            part = step.add(part, step.multiply(step.gate(operands["peepholes"], _PEEPHOLES[index]), state))
        return step.activate(part, 0)

    opened = gate(_INPUT, old)
    kept = step.one_minus(opened) if step.cell.input_forget else gate(_FORGET, old)
    offered = step.activate(step.gate(sums, _CELL), 1)
    new = step.add(step.multiply(kept, old), step.multiply(opened, offered))
    hidden = step.multiply(gate(_OUTPUT, new), step.activate(new, 2))
    return [step.masked(hidden, operands["hidden"], operands), step.masked(new, old, operands)]


_UPDATE, _RESET, _HIDDEN = range(3)  # the order of gates (ONNX, GRU)


def _gru(step: _Step, operands: _Operands) -> list[Expr]:
    inputs, old = operands["inputs"], operands["hidden"]
    if step.cell.linear_before_reset:
        products = step.product(old, operands["recurrent"])
        sums = step.add(step.gate(inputs, _UPDATE, 2), step.gate(products, _UPDATE, 2))
    else:
        sums = step.add(step.gate(inputs, _UPDATE, 2), step.product(old, operands["recurrent_gates"]))
    update, reset = (step.activate(step.gate(sums, index), 0) for index in (_UPDATE, _RESET))
    if step.cell.linear_before_reset:
        remembered = step.multiply(reset, step.add(step.gate(products, _HIDDEN), operands["recurrent_bias"]))
    else:
        remembered = step.product(step.multiply(reset, old), operands["recurrent_hidden"])
    offered = step.activate(step.add(step.gate(inputs, _HIDDEN), remembered), 1)
    hidden = step.add(step.multiply(step.one_minus(update), offered), step.multiply(update, old))
    return [step.masked(hidden, old, operands)]


def _rnn(step: _Step, operands: _Operands) -> list[Expr]:
    sums = step.add(operands["inputs"], step.product(operands["hidden"], operands["recurrent"]))
    return [step.masked(step.activate(sums, 0), operands["hidden"], operands)]


_WRITERS = {"lstm": _lstm, "gru": _gru, "rnn": _rnn}


_Function = Callable[[Expr, GateActivation, str], Expr]


def activated(builder: BlockBuilder, x: Expr, activation: GateActivation, dtype: str) -> Expr:
    """``activation`` of ``x``, emitted."""
    return builder.emit(_FUNCTIONS[activation.name](x, activation, dtype))


def _affine(x: Expr, activation: GateActivation, dtype: str) -> Expr:
    scaled = relax.op.multiply(x, relax.const(activation.alpha, dtype))
    return relax.op.add(scaled, relax.const(activation.beta, dtype))


def _scaled_tanh(x: Expr, activation: GateActivation, dtype: str) -> Expr:
    inner = relax.op.tanh(relax.op.multiply(x, relax.const(activation.beta, dtype)))
    return relax.op.multiply(inner, relax.const(activation.alpha, dtype))


def _thresholded_relu(x: Expr, activation: GateActivation, dtype: str) -> Expr:
    is_over = relax.op.greater_equal(x, relax.const(activation.alpha, dtype))
    return relax.op.where(is_over, x, relax.op.zeros_like(x))  # a constant would be a tensor beside the function


def _elu(x: Expr, activation: GateActivation, dtype: str) -> Expr:
    """The exponential of what is not positive: of large numbers it would be infinite, where it is not even chosen."""
    zero, one = relax.const(0.0, dtype), relax.const(1.0, dtype)
    curve = relax.op.subtract(relax.op.exp(relax.op.minimum(x, zero)), one)
    below = relax.op.multiply(curve, relax.const(activation.alpha, dtype))
    return relax.op.where(relax.op.greater_equal(x, zero), x, below)


def _softsign(x: Expr, _activation: GateActivation, dtype: str) -> Expr:
    return relax.op.divide(x, relax.op.add(relax.op.abs(x), relax.const(1.0, dtype)))


def _softplus(x: Expr, _activation: GateActivation, dtype: str) -> Expr:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), whose exponential is at most 1."""
    small = relax.op.exp(relax.op.negative(relax.op.abs(x)))
    rest = relax.op.log(relax.op.add(small, relax.const(1.0, dtype)))
    return relax.op.add(relax.op.maximum(x, relax.const(0.0, dtype)), rest)


_FUNCTIONS: dict[ActivationName, _Function] = {
    "Affine": _affine,
    "Elu": _elu,
    "HardSigmoid": lambda x, activation, dtype: relax.op.clip(_affine(x, activation, dtype), 0.0, 1.0),
    "LeakyRelu": lambda x, activation, dtype: relax.op.nn.leakyrelu(x, activation.alpha),
    "Relu": lambda x, activation, dtype: relax.op.nn.relu(x),
    "ScaledTanh": _scaled_tanh,
    "Sigmoid": lambda x, activation, dtype: relax.op.sigmoid(x),
    "Softplus": _softplus,
    "Softsign": _softsign,
    "Tanh": lambda x, activation, dtype: relax.op.tanh(x),
    "ThresholdedRelu": _thresholded_relu,
}
