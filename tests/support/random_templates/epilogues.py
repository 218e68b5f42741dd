"""Random epilogues: expressions as partitioning makes them, a step behind another, with what templates may read."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tvm_ext.byoc_cutlass.epilogue import ARITY, Epilogue
from tvm_ext.records.partition import EpilogueOperand, OperandRole

_MOST_STEPS = 4
_NUMBERS = ("0.5", "-1", "2", "6", "-0.25")
_UNARY = sorted(name for name, arity in ARITY.items() if arity == 1)
_BINARY = ("({0} + {1})", "({0} - {1})", "({0} * {1})", "({0} / {1})", "maximum({0}, {1})", "minimum({0}, {1})")
_TWICE = ("({0} * sigmoid({0}))", "({0} * {0})", "maximum({0}, {0} * 0.25)")
_ROLES: tuple[OperandRole, ...] = ("row", "column", "matrix", "scalar")


def random_epilogue(
    rng: random.Random,
    out_dtype: str,
    *,
    roles: Sequence[OperandRole] = _ROLES,
    dtypes: Sequence[str] = (),
    most: int = 3,
    batched: bool = False,
) -> Epilogue:
    """At most ``most`` operands of ``roles`` and ``dtypes`` (the result's and float32, unless given), each read once.

    Of batches some operands are the same for all products.
    """
    known = dtypes or (("float32",) if out_dtype in ("int8", "int32") else (out_dtype, "float32"))
    operands = tuple(
        EpilogueOperand(
            name=f"operand{number}",
            role=(role := rng.choice(roles)),
            dtype=rng.choice(known),
            batch_stride=int(batched and role != "scalar" and rng.random() < 0.5),
        )
        for number in range(rng.randint(0, most))
    )
    return Epilogue(expression=_expression(rng, operands), operands=operands, out_dtype=out_dtype)


def _expression(rng: random.Random, operands: Sequence[EpilogueOperand]) -> str:
    """Steps in any order: one for each operand, and some that read none; a value is used twice at most once."""
    own = [item.name for item in operands]
    steps: list[str | None] = [*own, *([None] * rng.randint(0, _MOST_STEPS - len(own)))]
    rng.shuffle(steps)
    value, twice = "accum", False
    for operand in steps:
        kind = rng.choice(("unary", "unary", "number", "cast", "twice"))
        if operand is not None:
            value = rng.choice(_BINARY).format(value, operand)
        elif kind == "number":
            value = rng.choice(_BINARY).format(value, rng.choice(_NUMBERS))
        elif kind == "cast":
            value = f"cast({value}, {rng.choice(('float16', 'bfloat16'))!r})"
        elif kind == "twice" and not twice:
            value, twice = rng.choice(_TWICE).format(value), True
        else:
            value = f"{rng.choice(_UNARY)}({value})"
    return value
