"""Operators that move and reduce, with the odd values of their attributes: negative axes and steps, modes, ends."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

from .definitions import one_hot as one_hot_definition
from .definitions import wrapped
from .draw_windows import Drawn, flip, numbers
from .record import Operand, Recipe

TYPES = ("float32", "float32", "float16", "float64", "int8", "int32", "int64", "uint8", "bool")


def _ints(*values: int, shape: tuple[int, ...] | None = None, is_known: bool = True) -> Operand:
    return Operand(shape=(len(values),) if shape is None else shape, values=values, is_known=is_known)


def _shape(chance: random.Random, low: int = 1) -> list[int]:
    return numbers(chance, chance.randint(low, 4), 1, 6)


def _axis(chance: random.Random, rank: int) -> int:
    return chance.randrange(-rank, rank)


def shape_change(chance: random.Random) -> Drawn:
    return chance.choice((_slice, _pad, _split, _concat, _transpose, _expand, _tile, _depth, _trilu, _flatten))(chance)


def _made(
    chance: random.Random, operator: str, *operands: Operand | None, outputs: int = 1, **attributes: Any
) -> Drawn:
    recipe = Recipe(operands=operands, attributes=attributes, outputs=outputs)
    types = {"T": chance.choice(TYPES)}
    return operator, types | {"T1": "int64"} if operator == "Tile" else types, recipe


def _slice(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    axes = chance.sample(range(len(shape)), chance.randint(1, len(shape)))
    steps = [chance.choice((-3, -2, -1, 1, 1, 2, 5)) for _ in axes]
    starts, ends = (numbers(chance, len(axes), -9, 9) for _ in range(2))
    if flip(chance, 0.3):
        ends[0] = chance.choice((2**63 - 1, -(2**63) + 1))
    signed = [axis - len(shape) if flip(chance) else axis for axis in axes]
    tables = [_ints(*values) for values in (starts, ends, signed, steps)]
    operands = (Operand(shape=tuple(shape), whole_range=True), *tables)
    return "Slice", {"T": chance.choice(TYPES), "Tind": "int64"}, Recipe(operands=operands)


def _pad(chance: random.Random) -> Drawn:
    shape = numbers(chance, chance.randint(1, 4), 3, 6)
    mode = chance.choice(("constant", "reflect", "edge", "wrap"))
    pads = numbers(chance, 2 * len(shape), -1, 2)
    value = Operand(shape=(), low=1, high=2) if mode == "constant" and flip(chance) else None
    data = Operand(shape=tuple(shape), whole_range=True)
    operator, types, recipe = _made(chance, "Pad", data, _ints(*pads), value, mode=mode)
    return operator, types, replace(recipe, definition=wrapped if mode == "wrap" else None)


def _split(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    axis = _axis(chance, len(shape))
    data = Operand(shape=tuple(shape), whole_range=True)
    if flip(chance, 0.4):
        parts = chance.randint(1, shape[axis])
        if -(-shape[axis] // parts) * (parts - 1) < shape[axis]:
            return _made(chance, "Split", data, None, outputs=parts, axis=axis, num_outputs=parts)
    cuts = sorted(numbers(chance, chance.randint(0, 3), 0, shape[axis]))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, shape[axis]], strict=True)]
    return _made(chance, "Split", data, _ints(*sizes), outputs=len(sizes), axis=axis)


def _concat(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    axis = _axis(chance, len(shape))
    parts = []
    for _ in range(chance.randint(1, 4)):
        extents = list(shape)
        extents[axis] = chance.randint(0, 4)
        parts.append(Operand(shape=tuple(extents), whole_range=True, is_known=flip(chance, 0.2)))
    return _made(chance, "Concat", *[Operand(shape=tuple(shape)), *parts], axis=axis)


def _transpose(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    order: dict[str, Any] = {} if flip(chance, 0.2) else {"perm": chance.sample(range(len(shape)), len(shape))}
    return _made(chance, "Transpose", Operand(shape=tuple(shape), whole_range=True), **order)


def _expand(chance: random.Random) -> Drawn:
    wide = _shape(chance)
    narrow = [1 if flip(chance) else extent for extent in wide[chance.randrange(len(wide)) :]]
    target = [1 if flip(chance, 0.3) and narrow[-len(wide) :] == wide else extent for extent in wide]
    return _made(chance, "Expand", Operand(shape=tuple(narrow), whole_range=True), _ints(*target))


def _tile(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    return _made(
        chance, "Tile", Operand(shape=tuple(shape), whole_range=True), _ints(*numbers(chance, len(shape), 0, 3))
    )


def _depth(chance: random.Random) -> Drawn:
    block, (n, c, h, w) = chance.randint(1, 3), numbers(chance, 4, 1, 3)
    if flip(chance):
        data = Operand(shape=(n, c * block**2, h, w), whole_range=True)
        return _made(chance, "DepthToSpace", data, blocksize=block, mode=chance.choice(("DCR", "CRD")))
    return _made(chance, "SpaceToDepth", Operand(shape=(n, c, h * block, w * block), whole_range=True), blocksize=block)


def _trilu(chance: random.Random) -> Drawn:
    shape = _shape(chance, low=2)
    data = Operand(shape=tuple(shape), whole_range=True)
    return _made(chance, "Trilu", data, _ints(chance.randint(-7, 7), shape=()), upper=chance.randrange(2))


def _flatten(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    return _made(chance, "Flatten", Operand(shape=tuple(shape), whole_range=True), axis=_axis(chance, len(shape)))


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


def reduction(chance: random.Random) -> Drawn:
    if flip(chance, 0.4):
        return chance.choice((_argument, _running, _top, _softmax, _layer_norm))(chance)
    shape = _shape(chance)
    axes = chance.sample(range(len(shape)), chance.randint(0, len(shape)))
    signed = [axis - len(shape) if flip(chance) else axis for axis in axes]
    given = _ints(*signed) if axes or flip(chance) else None
    attributes = {"keepdims": chance.randrange(2), "noop_with_empty_axes": chance.randrange(2)}
    recipe = Recipe(operands=(Operand(shape=tuple(shape), low=1, high=3), given), attributes=attributes)
    types = {"T": chance.choice(("float32", "float32", "float16", "float64", "int32", "int64"))}
    return f"Reduce{chance.choice(_REDUCTIONS)}", types, recipe


def _argument(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    attributes = {"axis": _axis(chance, len(shape)), "keepdims": chance.randrange(2)}
    attributes["select_last_index"] = chance.randrange(2)
    recipe = Recipe(operands=(Operand(shape=tuple(shape), low=0, high=3),), attributes=attributes)
    return chance.choice(("ArgMax", "ArgMin")), {"T": chance.choice(("float32", "float16", "int8", "int64"))}, recipe


def _running(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    attributes = {"exclusive": chance.randrange(2), "reverse": chance.randrange(2)}
    axis = _ints(_axis(chance, len(shape)), shape=())
    recipe = Recipe(operands=(Operand(shape=tuple(shape)), axis), attributes=attributes)
    return "CumSum", {"T": chance.choice(("float32", "float64", "int32", "int64")), "T2": "int64"}, recipe


def _top(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    axis = _axis(chance, len(shape))
    attributes = {"axis": axis, "largest": chance.randrange(2)}
    data = Operand(shape=tuple(shape), low=-1000, high=1000)
    recipe = Recipe(operands=(data, _ints(chance.randint(1, shape[axis]))), attributes=attributes, outputs=2)
    return "TopK", {"T": chance.choice(("float32", "float64", "int32", "int64"))}, recipe


def _softmax(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    recipe = Recipe(operands=(Operand(shape=tuple(shape)),), attributes={"axis": _axis(chance, len(shape))})
    return chance.choice(("Softmax", "LogSoftmax", "Hardmax")), {"T": chance.choice(("float32", "float16"))}, recipe


def _layer_norm(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    axis = _axis(chance, len(shape))
    scale, bias = (Operand(shape=tuple(shape[axis:]), is_known=flip(chance)) for _ in range(2))
    recipe = Recipe(operands=(Operand(shape=tuple(shape)), scale, bias), attributes={"axis": axis, "epsilon": 1e-3})
    return "LayerNormalization", {"T": chance.choice(("float32", "float16")), "U": "float32"}, recipe


def selection(chance: random.Random) -> Drawn:
    return chance.choice((_gather, _gather_elements, _scatter_elements, _compress, _one_hot, _gemm, _resize))(chance)


def _gather(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    axis = _axis(chance, len(shape))
    places = tuple(numbers(chance, chance.randint(0, 2), 1, 3))
    indices = Operand(shape=places, low=-shape[axis], high=shape[axis] - 1)
    recipe = Recipe(operands=(Operand(shape=tuple(shape), whole_range=True), indices), attributes={"axis": axis})
    return "Gather", {"T": chance.choice(TYPES), "Tind": chance.choice(("int32", "int64"))}, recipe


def _gather_elements(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    axis = _axis(chance, len(shape))
    places = [chance.randint(1, extent) for extent in shape]
    indices = Operand(shape=tuple(places), low=-shape[axis], high=shape[axis] - 1)
    recipe = Recipe(operands=(Operand(shape=tuple(shape), whole_range=True), indices), attributes={"axis": axis})
    return "GatherElements", {"T": chance.choice(TYPES), "Tind": chance.choice(("int32", "int64"))}, recipe


def _scatter_elements(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    axis = _axis(chance, len(shape))
    places = list(shape)
    places[axis] = 1
    indices = Operand(shape=tuple(places), low=-shape[axis], high=shape[axis] - 1)
    attributes = {"axis": axis, "reduction": chance.choice(("none", "add", "mul", "max", "min"))}
    data, updates = Operand(shape=tuple(shape)), Operand(shape=tuple(places))
    recipe = Recipe(operands=(data, indices, updates), attributes=attributes)
    return "ScatterElements", {"T": chance.choice(("float32", "float64", "int32")), "Tind": "int64"}, recipe


def _compress(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    axis = {} if flip(chance, 0.3) else {"axis": _axis(chance, len(shape))}
    extent = shape[axis["axis"]] if axis else 3
    keep = Operand(shape=(chance.randint(1, extent + 1),), is_known=flip(chance))
    recipe = Recipe(operands=(Operand(shape=tuple(shape), whole_range=True), keep), attributes=axis)
    return "Compress", {"T": chance.choice(TYPES), "T1": "bool"}, recipe


def _one_hot(chance: random.Random) -> Drawn:
    shape = _shape(chance)
    operands = (Operand(shape=tuple(shape), low=-4, high=6), _ints(5, shape=()), _ints(0, 1))
    types = {
        "T1": chance.choice(("int64", "int32", "float32")),
        "T2": "int64",
        "T3": chance.choice(("float32", "int32")),
    }
    attributes = {"axis": chance.randint(-len(shape) - 1, len(shape))}
    definition = partial(one_hot_definition, attributes)
    return "OneHot", types, Recipe(operands=operands, attributes=attributes, definition=definition)


def _gemm(chance: random.Random) -> Drawn:
    m, k, n = numbers(chance, 3, 1, 9)
    attributes: dict[str, Any] = {"transA": chance.randrange(2), "transB": chance.randrange(2)}
    attributes |= {"alpha": chance.choice((1.0, 0.5, 0.0)), "beta": chance.choice((1.0, -2.0, 0.0))}
    shapes = ((k, m) if attributes["transA"] else (m, k)), ((n, k) if attributes["transB"] else (k, n))
    bias = chance.choice((None, (), (1,), (n,), (m, 1), (1, n), (m, n)))
    known = flip(chance)
    operands = (
        Operand(shape=shapes[0]),
        Operand(shape=shapes[1], is_known=known),
        None if bias is None else Operand(shape=bias, is_known=known),
    )
    types = {"T": chance.choice(("float32", "float16", "float64", "int32"))}
    if types["T"] == "int32":
        attributes |= {"alpha": 1.0, "beta": 1.0}
    return "Gemm", types, Recipe(operands=operands, attributes=attributes)


def _resize(chance: random.Random) -> Drawn:
    shape = numbers(chance, 4, 1, 6)
    mode = chance.choice(("nearest", "linear", "cubic"))
    attributes: dict[str, Any] = {"mode": mode}
    attributes["coordinate_transformation_mode"] = chance.choice(("half_pixel", "asymmetric", "pytorch_half_pixel"))
    if mode == "nearest":
        attributes["nearest_mode"] = chance.choice(("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"))
    sizes = [*shape[:2], *numbers(chance, 2, 1, 9)]
    operands = (Operand(shape=tuple(shape)), None, None, _ints(*sizes))
    return "Resize", {"T1": "float32"}, Recipe(operands=operands, attributes=attributes)
