"""What an epilogue may say, and that whatever else it says is refused with a reason."""

from __future__ import annotations

import pytest

from tests.support.random_templates.products import EXPRESSIONS, epilogue_of
from tvm_ext.byoc_cutlass.epilogue import ARITY, Epilogue
from tvm_ext.errors import InputError
from tvm_ext.records.partition import EpilogueOperand

BIAS = EpilogueOperand(name="bias", role="row", dtype="float16")


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_is_allowed(expression: str) -> None:
    assert epilogue_of(expression, "float16").expression == expression


def test_the_expressions_have_every_function() -> None:
    assert all(f"{function}(" in " ".join(EXPRESSIONS) for function in (*ARITY, "cast"))


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("accum +", "no Python expression"),
        ("accum; accum", "no Python expression"),
        ("\0", "no Python expression"),
        ("accum + bais", "bais is no operand"),
        ("accum", "does not read bias"),
        ("bias", "does not read accum"),
        ("swish(accum + bias)", "no function swish"),
        ("relu(accum, bias)", "relu takes 1, not 2"),
        ("maximum(accum + bias)", "maximum takes 2, not 1"),
        ("relu(x=accum) + bias", "no visitor for relu"),
        ("accum @ bias", "no visitor for accum @ bias"),
        ("accum ** 2 + bias", "no visitor"),
        ("-accum + bias", "no visitor for -accum"),
        ("accum + bias * True", "no visitor for True"),
        ("accum + bias * 1e39", "no visitor for 1e"),
        ("accum + bias * 'a'", "no visitor"),
        ("bias.__class__(accum)", "no visitor"),
        ("(lambda: accum)() + bias", "no visitor"),
        ("cast(accum + bias)", "a cast lacks its type"),
        ("(" * 300 + "accum + bias" + ")" * 300, "no Python expression"),
    ],
)
def test_what_has_no_visitor_is_refused(expression: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        Epilogue(expression=expression, operands=(BIAS,), out_dtype="float16")


@pytest.mark.parametrize("names", [("bias", "bias"), ("accum",)])
def test_names_are_used_once(names: tuple[str, ...]) -> None:
    operands = tuple(EpilogueOperand(name=name, role="row", dtype="float16") for name in names)
    with pytest.raises(InputError, match="two of its operands have one name"):
        Epilogue(expression="accum + bias", operands=operands, out_dtype="float16")


@pytest.mark.parametrize("expression", ["cast(accum, 'float64')", "cast(accum, 'half')"])
def test_unknown_types_are_refused(expression: str) -> None:
    with pytest.raises(InputError, match="no tensors of"):
        Epilogue(expression=expression, out_dtype="float16")
    with pytest.raises(InputError, match="no tensors of float64"):
        Epilogue(out_dtype="float64")
