"""Operators element by element. Each computes in the dtype that torch promotes to."""

from __future__ import annotations

from typing import Any

from tvm_ext._tvm import Expr, relax

from .pen import RULES, TorchPen, TorchRule, dtype_of, is_float, rule

_UNARY = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh erf exp floor log negative:neg nn.relu:relu rsqrt sigmoid sign "
    "nn.silu:silu sin sinh sqrt square tan tanh trunc round"
)
_WHOLE = frozenset({"ceil", "floor", "trunc", "round"})  # of integers: themselves
_BINARY = "maximum minimum multiply:mul atan2"
_COMPARISONS = "equal:eq not_equal:ne less:lt less_equal:le greater:gt greater_equal:ge"
_BITS = "bitwise_and:logical_and bitwise_or:logical_or bitwise_xor:logical_xor"
_FORMS = ("Tensor", "Scalar", "default", "Tensor_Tensor", "Tensor_Scalar")


def _operator(path: str) -> Any:
    found = relax.op
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _register(names: str, make: Any, forms: tuple[str, ...]) -> None:
    for item in names.split():
        path, _, name = item.partition(":")
        name = name or path
        for form in forms:
            RULES[f"{name}.{form}"] = make(_operator(path), name)


def _unary(op: Any, name: str) -> TorchRule:
    def convert(pen: TorchPen) -> Expr:
        x = pen.operands[0]
        if name in _WHOLE and not is_float(dtype_of(x)):
            return x
        return pen.emit(op(pen.cast(x, pen.dtype)))

    return convert


def _binary(op: Any, _name: str) -> TorchRule:
    return lambda pen: pen.emit(op(*_promoted(pen)))


def _promoted(pen: TorchPen) -> tuple[Expr, Expr]:
    return pen.cast(pen.operands[0], pen.dtype), pen.cast(pen.operands[1], pen.dtype)


def _comparison(op: Any, _name: str) -> TorchRule:
    def convert(pen: TorchPen) -> Expr:
        import torch

        a, b = pen.operands[:2]
        samples = [
            x if not isinstance(x, Expr) else torch.empty((1,) * min(len(x.ty.shape), 1), dtype=_torch(dtype_of(x)))
            for x in (a, b)
        ]
        dtype = str(torch.result_type(*samples)).removeprefix("torch.")
        return pen.emit(op(pen.cast(a, dtype), pen.cast(b, dtype)))

    return convert


def _torch(dtype: str) -> Any:
    import torch

    return getattr(torch, dtype)


def _bits(op: Any, name: str) -> TorchRule:
    logical = _operator(name)

    def convert(pen: TorchPen) -> Expr:
        return pen.emit((logical if pen.dtype == "bool" else op)(*_promoted(pen)))

    return convert


def _logical(op: Any, _name: str) -> TorchRule:
    return lambda pen: pen.emit(op(*(pen.cast(x, "bool") for x in pen.operands)))


_register(_UNARY, _unary, ("default",))
_register(_BINARY, _binary, _FORMS)
_register(_COMPARISONS, _comparison, _FORMS[:2])
_register("logical_and logical_or logical_xor logical_not", _logical, ("default",))
for _item in _BITS.split():
    _path, _, _truth = _item.partition(":")
    for _form in _FORMS[:2]:
        RULES[f"{_path}.{_form}"] = _bits(_operator(_path), _truth)


@rule("pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor")
def _power(pen: TorchPen) -> Expr:
    """Small known exponents are products: exact for integers, and for bases below 0."""
    base, exponent = pen.operands
    if isinstance(exponent, int | float) and exponent in (1, 2, 3):
        x = value = pen.cast(base, pen.dtype)
        for _ in range(int(exponent) - 1):
            value = pen.emit(relax.op.multiply(value, x))
        return value
    if not is_float(pen.dtype):
        raise pen.refusal("raises integers to a power other than 1, 2 and 3", "cast to floats first")
    return pen.emit(relax.op.power(*_promoted(pen)))


@rule("bitwise_not")
def _bitwise_not(pen: TorchPen) -> Expr:
    x = pen.operands[0]
    return pen.emit((relax.op.logical_not if pen.dtype == "bool" else relax.op.bitwise_not)(x))


@rule("isnan isinf")
def _non_finite(pen: TorchPen) -> Expr:
    x = pen.operands[0]
    if not is_float(dtype_of(x)):
        return pen.emit(relax.op.broadcast_to(relax.const(False, "bool"), list(pen.shape)))
    if pen.name.startswith("isnan"):
        return pen.emit(relax.op.not_equal(x, x))
    return pen.emit(relax.op.equal(pen.emit(relax.op.abs(x)), pen.cast(float("inf"), dtype_of(x))))


@rule("reciprocal")
def _reciprocal(pen: TorchPen) -> Expr:
    return pen.emit(relax.op.divide(pen.cast(1, pen.dtype), pen.cast(pen.operands[0], pen.dtype)))


@rule("add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar")
def _add(pen: TorchPen) -> Expr:
    """The second operand counts ``alpha`` times."""
    a, b = _promoted(pen)
    alpha = pen.operands[2]
    if pen.name.startswith("rsub"):
        a, b = b, a
        if alpha != 1:
            raise pen.refusal(f"scales by alpha={alpha}")
    if alpha != 1:
        b = pen.emit(relax.op.multiply(b, pen.cast(alpha, pen.dtype)))
    return pen.emit((relax.op.add if pen.name.startswith("add") else relax.op.subtract)(a, b))


@rule("div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode floor_divide floor_divide.Scalar")
def _divide(pen: TorchPen) -> Expr:
    mode = pen.operands[2] if pen.name.endswith("_mode") else "floor" if pen.name.startswith("floor") else None
    a, b = _promoted(pen)
    if mode is None:
        return pen.emit(relax.op.divide(a, b))
    if is_float(pen.dtype) and mode == "floor":
        raise pen.refusal("rounds quotients of floats down, as torch does by remainders", "divide integers")
    if is_float(pen.dtype):
        return pen.emit(relax.op.trunc(pen.emit(relax.op.divide(a, b))))
    return pen.emit((relax.op.floor_divide if mode == "floor" else relax.op.divide)(a, b))


@rule("remainder.Tensor remainder.Scalar fmod.Tensor fmod.Scalar")
def _remainder(pen: TorchPen) -> Expr:
    """fmod has the sign of the dividend, remainder that of the divisor."""
    a, b = _promoted(pen)
    if pen.name.startswith("fmod"):
        return pen.emit(relax.op.mod(a, b))
    if not is_float(pen.dtype):
        return pen.emit(relax.op.floor_mod(a, b))
    rest, zero = pen.emit(relax.op.mod(a, b)), pen.cast(0, pen.dtype)
    signs = pen.emit(relax.op.not_equal(pen.emit(relax.op.less(rest, zero)), pen.emit(relax.op.less(b, zero))))
    moved = pen.emit(relax.op.logical_and(signs, pen.emit(relax.op.not_equal(rest, zero))))
    return pen.emit(relax.op.where(moved, pen.emit(relax.op.add(rest, b)), rest))


@rule("where.self where.ScalarOther where.ScalarSelf where.Scalar")
def _where(pen: TorchPen) -> Expr:
    condition, a, b = pen.operands
    return pen.emit(relax.op.where(condition, pen.cast(a, pen.dtype), pen.cast(b, pen.dtype)))


@rule("masked_fill.Scalar masked_fill.Tensor")
def _masked_fill(pen: TorchPen) -> Expr:
    x, mask, value = pen.operands
    return pen.emit(relax.op.where(mask, pen.cast(value, pen.dtype), x))


@rule("clamp clamp.Tensor clamp_min clamp_max hardtanh relu6")
def _clamp(pen: TorchPen) -> Expr:
    x, *bounds = pen.operands
    if pen.name.startswith("relu6"):
        bounds = [0, 6]
    if pen.name.startswith("clamp_max"):
        bounds = [None, *bounds]
    least, most = (*bounds, None)[:2]
    x = pen.cast(x, pen.dtype)
    if least is not None:
        x = pen.emit(relax.op.maximum(x, pen.cast(least, pen.dtype)))
    return x if most is None else pen.emit(relax.op.minimum(x, pen.cast(most, pen.dtype)))


@rule("gelu")
def _gelu(pen: TorchPen) -> Expr:
    x, approximate = pen.operands
    return pen.emit((relax.op.nn.gelu_tanh if approximate == "tanh" else relax.op.nn.gelu)(x))


@rule("leaky_relu")
def _leaky_relu(pen: TorchPen) -> Expr:
    x, slope = pen.operands
    scaled = pen.emit(relax.op.multiply(x, pen.cast(slope, pen.dtype)))
    return pen.emit(relax.op.where(pen.emit(relax.op.greater(x, pen.cast(0, pen.dtype))), x, scaled))


@rule("_to_copy to.dtype to.dtype_layout type_as prims.convert_element_type")
def _converted(pen: TorchPen) -> Expr:
    return pen.cast(pen.operands[0], pen.dtype)


@rule("elu")
def _elu(pen: TorchPen) -> Expr:
    """scale * x above 0, and scale * alpha * (exp(input_scale * x) - 1) elsewhere; selu and celu come as this, too."""
    x, alpha, scale, input_scale = pen.operands
    power = x if input_scale == 1 else pen.emit(relax.op.multiply(x, pen.cast(input_scale, pen.dtype)))
    below = pen.emit(relax.op.subtract(pen.emit(relax.op.exp(power)), pen.cast(1, pen.dtype)))
    below = pen.emit(relax.op.multiply(below, pen.cast(alpha * scale, pen.dtype)))
    above = x if scale == 1 else pen.emit(relax.op.multiply(x, pen.cast(scale, pen.dtype)))
    return pen.emit(relax.op.where(pen.emit(relax.op.greater(x, pen.cast(0, pen.dtype))), above, below))
