"""Epilogues as texts of C++: kept ones, what is shared and what is added, and arguments that match their types."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.random_templates.products import EXPRESSIONS, epilogue_of
from tvm_ext.byoc_cutlass.evt import Generation, VisitorTree, function_template, visitor_tree

pytest.importorskip("cutlass_library", reason="the extra `cutlass` is not installed")

GENERATIONS: tuple[Generation, ...] = ("2.x", "3.x")


def tree(expression: str, generation: Generation, out_dtype: str = "float16") -> VisitorTree:
    return visitor_tree(epilogue_of(expression, out_dtype), "float32", generation)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_text_is_the_kept_one(generation: Generation, golden: Callable[[str, str], None]) -> None:
    """A tree, a shared value with a function of our own, and a cast in the middle."""
    chosen = ("relu(accum + row) * -2.5e-05 + matrix", "softplus(accum + column) * (accum + column)")
    trees = [tree(text, generation) for text in (*chosen, "cast(accum * scalar, 'bfloat16') / 3")]
    text = "\n\n".join(f"{item.declarations}\n\n{item.name}\n{item.argument}" for item in trees)
    golden(f"cutlass_epilogues_{generation[0]}x.evt", text + "\n")


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_type_is_declared_before_it_is_used(expression: str, generation: Generation) -> None:
    given = {"OutputTileThreadMap", "EpilogueDescriptor"}
    found = tree(expression, generation)
    for line in re.split(r";\n", found.declarations):
        declared = re.search(r"using (\w+) =", line)
        used = set(re.findall(r"(?<![\w:])(?:EVT|Dag|Compute|Operand|Constant|Accum|D\b)\w*(?!\w*::)", line))
        assert declared is not None
        assert {name for name in used if name != declared[1]} <= given, line
        given.add(declared[1])
    assert found.name in given


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_operand_is_an_argument(expression: str, generation: Generation) -> None:
    epilogue = epilogue_of(expression, "float32")
    text = visitor_tree(epilogue, "float32", generation).argument
    assert text.count("{") == text.count("}")
    read = [int(number) for number in re.findall(r"operands\[(\d+)\]", text)]
    assert sorted(set(read)) == list(range(len(epilogue.operands)))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_what_is_said_twice_is_one_node(generation: Generation) -> None:
    once = tree("sigmoid(accum + row) * (accum + row)", generation)
    assert once.declarations.count("cutlass::plus") == 1
    assert "TopologicalVisitor" in once.declarations
    squared = tree("(accum + row) * (accum + row)", generation)
    assert squared.declarations.count("cutlass::plus") == 1
    assert "cute::seq<0, 1>" in squared.declarations or "cute::seq<1, 0>" in squared.declarations


def test_no_name_of_an_operand_is_one_that_the_tracer_keeps() -> None:
    found = tree("accum + row", "3.x")
    assert "Operand0" in found.declarations
    assert "TensorC" not in found.declarations


@pytest.mark.parametrize(("out_dtype", "exact"), [("float16", False), ("bfloat16", False), ("float32", True)])
def test_wide_results_have_an_exact_tanh(out_dtype: str, exact: bool) -> None:
    for expression, own in (("tanh(accum)", "Tanh"), ("gelu_tanh(accum)", "GeluTanh")):
        assert (f"::tvm_ext::{own}," in tree(expression, "2.x", out_dtype).declarations) == exact


@pytest.mark.parametrize("expression", ["accum", "cast(accum + row, 'float16')"])
def test_the_last_visitor_of_a_collective_makes_the_result(expression: str) -> None:
    found = tree(expression, "3.x", "float32")
    last = re.findall(r"Sm90Compute<\s*([\w:]+), ([\w:]+), float", found.declarations)[-1]
    assert last == ("cutlass::epilogue::thread::Identity", "float")


@pytest.mark.parametrize("generation", GENERATIONS)
def test_extremes_keep_nan_as_the_graph_s_do(generation: Generation) -> None:
    found = tree("maximum(minimum(accum, 6), row)", generation).declarations
    assert re.findall(r"cutlass::(m[ai][xn]\w+)", found) == [
        "minimum_with_nan_propagation", "maximum_with_nan_propagation",
    ]  # fmt: skip
    assert function_template("maximum", "float16") == "cutlass::maximum_with_nan_propagation"


def test_importing_the_tracer_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    hidden = (
        "import importlib.util as u; f = u.find_spec\nu.find_spec = lambda n, *a: None if n == 'pydot' else f(n, *a)\n"
    )
    # A module that stood in has no specification; one that something else imports, as where pydot is installed, has.
    code = (
        "from tvm_ext.byoc_cutlass import _cutlass; import sys; _cutlass.tracer()\n"
        "names = (*_cutlass._UNUSED, _cutlass._COMPILER)\n"
        "print([n for n in names if n in sys.modules and sys.modules[n].__spec__ is None])"
    )
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
    assert not list(tmp_path.iterdir())
