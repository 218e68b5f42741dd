"""Holds the words of the package: one meaning for a name, and signatures that say what they take.

Read from the sources, as in test_layers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source_trees import parsed

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tvm_ext"
SOURCES = {str(path.relative_to(ROOT)): path for path in sorted(PACKAGE.rglob("*.py"))}

MOST_ANY = 0.03
"""Share of annotations in which `Any` occurs. What is left is given by others: JSON, arguments passed on, ctypes."""


def _annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Those of parameters, results and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


def _says_any(annotation: ast.expr) -> bool:
    """Quoted annotations are read as well."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "Any" in node.value:
            return True
        if (isinstance(node, ast.Name) and node.id == "Any") or (
            isinstance(node, ast.Attribute) and node.attr == "Any"
        ):
            return True
    return False


def _names_of_types(tree: ast.Module) -> Iterator[str]:
    """Classes, and aliases of types at a module's top level: ``Table = list[...]``, ``Table: TypeAlias = ...``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id.lstrip("_")[0].isupper() and not target.id.isupper():
            yield target.id


def _defined_twice(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for name, tree in trees.items():
        for defined in set(_names_of_types(tree)):
            places.setdefault(defined, []).append(name)
    return {name: where for name, where in places.items() if len(where) > 1}


def test_a_name_of_a_type_is_defined_once() -> None:
    assert not _defined_twice({name: parsed(SOURCES[name]) for name in SOURCES})


def test_two_definitions_are_found() -> None:
    first, second = (
        ast.parse("class Window: ...\nShape = tuple[int, ...]"),
        ast.parse("class Window: ...\nShape = list"),
    )
    assert _defined_twice({"a": first, "b": second}) == {"Window": ["a", "b"], "Shape": ["a", "b"]}


def test_signatures_say_what_they_take() -> None:
    found = [_says_any(annotation) for name in SOURCES for annotation in _annotations(parsed(SOURCES[name]))]
    assert sum(found) < MOST_ANY * len(found), f"{sum(found)} of {len(found)} annotations say Any"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f(a: Any, *b: int, c: dict[str, Any]) -> Any: ...", 3),
        ("x: 'list[Any]' = []\ny: typing.Any", 2),
        ("def f(self, a: Expr, **b: Buffer) -> IRModule: ...", 0),
    ],
)
def test_any_is_counted(source: str, count: int) -> None:
    assert sum(map(_says_any, _annotations(ast.parse(source)))) == count


def _transforms() -> Iterator[tuple[str, ast.FunctionDef]]:
    for name in SOURCES:
        for node in ast.walk(parsed(SOURCES[name])):
            if isinstance(node, ast.FunctionDef) and node.name == "transform_module":
                yield name, node


def test_a_pass_takes_a_module_and_gives_one() -> None:
    passes = list(_transforms())
    assert len(passes) > 10
    for name, node in passes:
        taken = [ast.unparse(item.annotation) for item in node.args.args if item.annotation is not None]
        assert taken == ["IRModule", "PassContext"], f"{name}: {node.name} takes {taken}"
        assert node.returns is not None and ast.unparse(node.returns) == "IRModule", name


_COLLECTIONS = ("range", "min", "max", "tuple", "set", "frozenset")
"""Calls whose arguments are numbers. Those of a record stand beside the names of their fields."""


def _numeric(value: ast.expr) -> bool:
    """Whether ``value`` is a number that is written out, arithmetic with one, or a collection of such."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    if isinstance(value, ast.UnaryOp):
        return _numeric(value.operand)
    if isinstance(value, ast.BinOp):
        return _numeric(value.left) or _numeric(value.right)
    if isinstance(value, ast.Dict):
        return any(map(_numeric, value.values))
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in _COLLECTIONS and any(map(_numeric, value.args))
    return isinstance(value, ast.Tuple | ast.List | ast.Set) and any(map(_numeric, value.elts))


def _numbers_without_a_source(text: str, tree: ast.Module) -> Iterator[str]:
    """Constants of a module without a comment beside or above them or a string below: where the number comes from.

    A comment is above all assignments that follow without an empty line.
    """
    lines, body = text.splitlines(), tree.body
    assignments = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    said_in = {node.lineno for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    for node in assignments:
        assert node.value is not None and node.end_lineno is not None
        first = node.lineno - 1
        while first and lines[first - 1].strip():
            first -= 1
        above = any(line.startswith("#") for line in lines[first : node.lineno - 1])
        beside = any("#" in line for line in lines[node.lineno - 1 : node.end_lineno])
        if _numeric(node.value) and not above and not beside and node.end_lineno + 1 not in said_in:
            yield ast.unparse(node)


def test_numbers_say_where_they_come_from() -> None:
    bare = {name: _numbers_without_a_source(path.read_text("utf-8"), parsed(path)) for name, path in SOURCES.items()}
    assert [(name, number) for name, numbers in bare.items() for number in numbers] == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("LIMIT = 8\nSHARE: float = -0.5\nSIDES = (16, 2**4)\nA, B = range(2)\nUNITS = {'s': 1.0}", 5),
        ("LIMIT = 8\n'''Of a warp.'''\nSHARE = 0.5  # a choice\n# Tiles.\nROWS = (1, 2)\nCOLUMNS = [4]", 0),
        ("# Of others.\n\nLIMIT = 8", 1),
        ("NAME = 'x'\nON = True\nROW = Row(1)\nEMPTY = ()\ndef f():\n    x = 1", 0),
    ],
)
def test_numbers_without_a_source_are_found(source: str, count: int) -> None:
    assert len(list(_numbers_without_a_source(source, ast.parse(source)))) == count
