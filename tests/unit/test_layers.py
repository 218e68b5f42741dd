"""Holds the layers of the package by reading the imports of its sources.

Bottom: plain modules of `tvm_ext/` which import the bottom alone. A stage (a folder) imports the bottom and itself. The
top may import everything, and only the top imports the top. Every exception is named here with its reason.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "tvm_ext"

TOP = {
    "__init__", "_autoload", "cli", "export", "frontend", "graph_module", "library", "pipeline", "recorder", "relay",
    "report", "signature", "testing",
}  # fmt: skip
TOP_PREFIXES = ("cli_", "report_")
STAGES = {"autotune", "byoc_cutlass", "rammer_runtime", "relay_passes", "tir_passes"}

# (importer, imported): why it may cross the layers. An entry that is no longer needed fails the test.
CROSSINGS: dict[tuple[str, str], str] = {
    ("_native", "tvm_ext"): "asks the package for its search path, which an editable installation extends",
    ("relay_passes.runtime_checks", "tir_passes.build_ir"): "a kernel that the graph gets needs constructors for loops",
}

# Module: why it may name a module inside TVM. All others import TVM's top-level modules, or take the name from _tvm.
INSIDE_TVM: dict[str, str] = {
    "_autoload": "asks whether TVM has its compiler, before anything that needs one is imported",
    "forks": "TVM's runtime is called past its Python interface, in processes that have the runtime alone",
    "guarded_memory": "the VirtualMachine is run in processes that have TVM's runtime alone",
    "machine": "the VirtualMachine is run in processes that have TVM's runtime alone",
}
TOP_LEVEL_TVM = {"tvm.ir", "tvm.relax", "tvm.s_tir", "tvm.te", "tvm.tirx", "tvm.topi", "tvm.transform", "tvm.script"}

ENVIRONMENT_READERS = {"options": "the one place that reads the environment"}


def _modules() -> dict[str, Path]:
    """Dotted name below the package (``tir_passes.roller.rtile``; ``__init__`` for the package) to file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = _modules()


def _imports(name: str, *, at_import_time: bool = False) -> Iterator[str]:
    """Full dotted names that module ``name`` imports; ``from a import b`` yields a.b where that is a module of ours."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in _nodes(tree, at_import_time=at_import_time):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner.removeprefix("tvm_ext.") in MODULES or base == "tvm" else base


def _nodes(tree: ast.AST, *, at_import_time: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if at_import_time and (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(child)):
            continue
        yield child
        yield from _nodes(child, at_import_time=at_import_time)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _absolute(name: str, node: ast.ImportFrom) -> str:
    """The module of a ``from`` import; in tir_passes.roller.rtile, ``from ..x`` means tvm_ext.tir_passes.x."""
    if not node.level:
        return node.module or ""
    package = ["tvm_ext", *([] if name == "__init__" else name.split("."))]
    if MODULES[name].stem != "__init__":
        package.pop()
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _ours(name: str, *, at_import_time: bool = False) -> set[str]:
    """Modules of ours that ``name`` imports, without the package prefix ("tvm_ext" itself stays)."""
    imported = {item for item in _imports(name, at_import_time=at_import_time) if item.split(".")[0] == "tvm_ext"}
    return {item.removeprefix("tvm_ext.") for item in imported}


def _layer(name: str) -> str:
    """Name of the stage, "top" or "bottom"."""
    head = name.split(".")[0]
    if head in STAGES:
        return head
    return "top" if head in TOP | {"tvm_ext"} or head.startswith(TOP_PREFIXES) else "bottom"


def _allowed(importer: str, imported: str) -> bool:
    own, other = _layer(importer), _layer(imported)
    return own in ("top", other) or other == "bottom"


def test_sources_are_found() -> None:
    assert {"errors", "tir_passes", "options"} <= {name.split(".")[0] for name in MODULES}


def test_relative_imports_are_resolved() -> None:
    (statement,) = ast.parse("from .._tvm import For").body
    assert isinstance(statement, ast.ImportFrom)
    importer = next(name for name in MODULES if name.startswith("tir_passes.") and name.count(".") == 1)
    expected = "tvm_ext.tir_passes._tvm" if MODULES[importer].stem == "__init__" else "tvm_ext._tvm"
    assert _absolute(importer, statement) == expected


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_lies_below_it(name: str) -> None:
    wrong = {item for item in _ours(name) if not _allowed(name, item) and (name, item) not in CROSSINGS}
    assert not wrong, (
        f"{name} ({_layer(name)}) imports {', '.join(f'{item} ({_layer(item)})' for item in sorted(wrong))}"
    )


def test_every_named_exception_is_needed() -> None:
    unused = [pair for pair in CROSSINGS if pair[0] not in MODULES or pair[1] not in _ours(pair[0])]
    assert not unused
    assert all(_inside_tvm(name) for name in INSIDE_TVM if name in MODULES)
    assert set(MODULES) >= set(ENVIRONMENT_READERS)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        name: {i for i in _ours(name, at_import_time=True) if i in MODULES and i != "__init__"} for name in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def _inside_tvm(name: str) -> set[str]:
    imported = {item for item in _imports(name) if item.split(".")[0] == "tvm" and item.count(".")}
    return {item for item in imported if item not in TOP_LEVEL_TVM and not item.startswith("tvm.script")}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "_tvm" and name not in INSIDE_TVM])
def test_names_inside_tvm_are_in_one_module(name: str) -> None:
    assert not _inside_tvm(name), f"{name}: take these from tvm_ext._tvm"


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ENVIRONMENT_READERS])
def test_only_options_reads_the_environment(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    attributes = {(node.value.id, node.attr) for node in names}
    assert not attributes & {("os", "environ"), ("os", "getenv"), ("os", "environb"), ("os", "putenv")}


@pytest.mark.parametrize("name", MODULES)
def test_no_blanket_except(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    caught = [node.type for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    assert all(kind is not None for kind in caught)
    assert not {kind.id for kind in caught if isinstance(kind, ast.Name)} & {"Exception", "BaseException"}
