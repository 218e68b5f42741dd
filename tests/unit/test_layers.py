"""Holds the floors of the package by reading the imports of its sources, those inside functions and for types too, and
those by `importlib` of a name that is written out.

A room (a folder below `tvm_ext/`) imports itself and the floors below it. Rooms of one floor do not know each other. At
every level, folders and modules that lie side by side import each other in no circle. Every exception is named here
with its reason. docs/architecture.md has the picture.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

import pytest

from tests.support.source_trees import parsed

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tvm_ext"

# From the ground up. Modules of the root are named one by one, rooms by their folder.
FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(floor.split())
    for floor in (
        "errors core_count options forks exclusive _tvm _environment _native",  # the ground
        "records",
        "support",
        "devices",
        "analysis",
        "ir",
        "cost",
        "byoc_cutlass",  # what of a graph CUTLASS takes; a graph pass cuts it out
        "relay_passes tir_passes rammer_runtime autotune",  # the middle: they meet as data
        "toolchains reports",
        "runtime",
        "verify tuning",
        "frontend pass_pipeline recorder relay",  # the way of a model
        "bench session",
        "cli",
        "_autoload",  # what TVM calls: registers what is imported by name when it is first used
        "__init__",  # the door
    )
)
GROUND, WAY = FLOORS[0], FLOORS[12]
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS) for name in floor}
MOST_ROOT_MODULES = 14
MOST_LINES = 400
PYTHON_FOLDERS = ("tvm_ext", "tests", "benchmarks", "examples")

# (importer, imported): why it may cross the floors. An entry that is no longer needed fails the test.
CROSSINGS: dict[tuple[str, str], str] = {
    ("_native", "__init__"): "asks the package for its search path, which an editable installation extends"
}

# (importer, imported): an arrow that would close a circle, and why there is no better place for either.
CIRCLES: dict[tuple[str, str], str] = {
    ("runtime.graph_module", "runtime.library"): "a library gives GraphModules, and these are made of loaded modules"
}

# Module: why it may name a module inside TVM. All others import TVM's top-level modules, or take the name from _tvm.
INSIDE_TVM: dict[str, str] = {
    "_autoload": "asks whether TVM has its compiler, before anything that needs one is imported",
    "forks": "TVM's runtime is called past its Python interface, in processes that have the runtime alone",
    "relay_passes.pytorch.import_program": "the stock importer needs torch, and is imported where that is known to be",
    "runtime.machine": "the VirtualMachine is run in processes that have TVM's runtime alone",
}
TOP_LEVEL_TVM = {"tvm.ir", "tvm.relax", "tvm.s_tir", "tvm.te", "tvm.tirx", "tvm.topi", "tvm.transform", "tvm.script"}

# The floors inside tir_passes/, from below: planners do not know emitters, and neither knows the passes, which meet as
# data in pass_pipeline.py. Every module of the folder itself is a pass, or what passes share is in one of these.
TIR_FLOORS = ("expressions roller", "plan pipelining", "emit", "kinds")
TIR_FLOOR_OF = {name: number for number, floor in enumerate(TIR_FLOORS) for name in floor.split()}
PASS_MAKERS = {"call_pass", "module_pass", "prim_func_pass"}

ENVIRONMENT_READERS = {
    "options": "the one place that reads the environment",
    "tests.support.opencl_cpu": "tells OpenCL's loader where a driver is, unless the user has",
    "tests.support.quick_imports": "extends the path of the processes that tests start",
}


def _modules(folder: Path) -> dict[str, Path]:
    """Dotted name below ``folder`` (``tir_passes.roller.rtile``; ``__init__`` for the folder itself) to file."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = _modules(PACKAGE)
# What holds for the package's lines holds for those of the tests' support: name (with its folder) to file.
SOURCES = MODULES | {f"tests.support.{name}": path for name, path in _modules(ROOT / "tests" / "support").items()}


@functools.cache
def _imports(name: str) -> frozenset[str]:
    """Full dotted names that module ``name`` imports; ``from a import b`` gives a.b where that is a module of ours."""
    found: set[str] = set()
    for node in _nodes(name):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner.removeprefix("tvm_ext.") in MODULES or base == "tvm" else base)
        elif isinstance(node, ast.Call):
            found |= {_resolved(name, dynamic) for dynamic in _imported_by_name(node)}
    return frozenset(found)


def _imported_by_name(call: ast.Call) -> set[str]:
    """The module that a call of `importlib.import_module` or `__import__` names, where its name is written out."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    first = call.args[0] if call.args else None
    if function not in ("import_module", "__import__") or not isinstance(first, ast.Constant):
        return set()
    return {str(first.value)}


def _resolved(name: str, imported: str) -> str:
    """The full name of a module that ``name`` imports as ``.verification``."""
    level = len(imported) - len(imported.lstrip("."))
    if not level:
        return imported
    return _absolute(name, ast.ImportFrom(module=imported[level:], names=[], level=level))


LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.ExceptHandler, ast.ClassDef, ast.FunctionDef)


@functools.cache
def _nodes(name: str) -> tuple[ast.AST, ...]:
    """Those of a module's nodes that the tests look at: a walk takes longer than all tests of what it finds."""
    return tuple(node for node in ast.walk(parsed(SOURCES[name])) if isinstance(node, LOOKED_AT))


def _absolute(name: str, node: ast.ImportFrom) -> str:
    """The module of a ``from`` import; in tir_passes.roller.rtile, ``from ..x`` means tvm_ext.tir_passes.x."""
    if not node.level:
        return node.module or ""
    package = ["tvm_ext", *([] if name == "__init__" else name.split("."))]
    if SOURCES[name].stem != "__init__":
        package.pop()
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _ours(name: str) -> set[str]:
    """Modules of ours that ``name`` imports, without the package prefix; the package itself is ``__init__``."""
    imported = {item for item in _imports(name) if item.split(".")[0] == "tvm_ext"}
    return {item.removeprefix("tvm_ext.") if item != "tvm_ext" else "__init__" for item in imported}


def _allowed(importer: str, imported: str) -> bool:
    own, other = importer.split(".")[0], imported.split(".")[0]
    if own == other or FLOOR_OF[other] < FLOOR_OF[own]:
        return True
    return FLOOR_OF[other] == FLOOR_OF[own] and {own, other} <= GROUND | WAY  # modules, not rooms


def test_every_module_has_a_floor() -> None:
    assert {name.split(".")[0] for name in MODULES} == set(FLOOR_OF)


def test_the_root_is_short() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_ROOT_MODULES


def test_no_file_is_long() -> None:
    files = [*ROOT.glob("*.py"), *(path for folder in PYTHON_FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    lengths = {path.relative_to(ROOT): path.read_bytes().count(b"\n") for path in files}
    assert len(lengths) > len(SOURCES)
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES.values()} - {PACKAGE}))
def test_a_folder_says_what_lives_there(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_relative_imports_are_resolved() -> None:
    (statement,) = ast.parse("from ..expressions import exact_floats").body
    assert isinstance(statement, ast.ImportFrom)
    assert _absolute("tir_passes.plan.plan_kernels", statement) == "tvm_ext.tir_passes.expressions"
    assert _absolute("tir_passes.plan", statement) == "tvm_ext.tir_passes.expressions"


def test_imports_by_name_are_seen() -> None:
    assert {"pass_pipeline", "toolchains.tir_pipelines", "toolchains.cutlass_codegen"} <= _ours("_autoload")
    assert "verify.verification" in _ours("verify")
    (call,) = (node for node in ast.walk(ast.parse("__import__('tvm_ext.cli')")) if isinstance(node, ast.Call))
    assert _imported_by_name(call) == {"tvm_ext.cli"}


def test_a_module_imports_only_what_lies_below_it() -> None:
    wrong = {
        (name, item)
        for name in MODULES
        for item in _ours(name)
        if not _allowed(name, item) and (name, item) not in CROSSINGS
    }
    assert not wrong


def _tir_floor(name: str) -> int:
    """The floor of a module of tir_passes/; that of the passes is above all folders."""
    return TIR_FLOOR_OF.get(name.split(".")[1], len(TIR_FLOORS))


def _too_high(name: str, imported: set[str]) -> set[str]:
    """What a module of tir_passes/ imports though it lies above it, or beside it in another folder."""
    own = name.split(".")[1]
    inside = {item for item in imported if item.startswith("tir_passes.") and item.split(".")[1] != own}
    return {item for item in inside if _tir_floor(item) >= _tir_floor(name)}


TIR_MODULES = [name for name in MODULES if name.startswith("tir_passes.")]


def test_planners_know_no_emitters_and_neither_knows_a_pass() -> None:
    assert {name: found for name in TIR_MODULES if (found := _too_high(name, _ours(name)))} == {}


def _siblings_of(name: str, imported: set[str]) -> set[str]:
    """Folders of emitters beside the one of ``name`` that it imports from; what two of them share lies in ir/."""
    folders = {path.name for path in (PACKAGE / "tir_passes" / "emit").iterdir() if (path / "__init__.py").exists()}
    own = name.split(".")[2]
    taken = {item.split(".")[2] for item in imported if item.startswith("tir_passes.emit.")}
    return (taken & folders) - {own} if own in folders else set()


def test_emitters_do_not_borrow_from_siblings() -> None:
    emitters = [name for name in TIR_MODULES if name.startswith("tir_passes.emit.")]
    assert {name: found for name in emitters if (found := _siblings_of(name, _ours(name)))} == {}
    assert _siblings_of("tir_passes.emit.gpu_rows.emit", {"tir_passes.emit.cpu_rows.emit", "tir_passes.plan.form"})
    assert not _siblings_of("tir_passes.emit.step_loops", {"tir_passes.emit.cpu_rows.emit"})


def test_every_folder_of_the_passes_has_a_floor() -> None:
    folders = {path.name for path in (PACKAGE / "tir_passes").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(TIR_FLOOR_OF)


def test_a_planner_that_imports_an_emitter_is_found() -> None:
    assert _too_high("tir_passes.plan.form", {"tir_passes.emit.cpu_rows.emit", "tir_passes.roller.align"})
    assert _too_high("tir_passes.emit.cpu_rows.emit", {"tir_passes.construct_cpu_kernels"})
    assert not _too_high("tir_passes.emit.cpu_rows.emit", {"tir_passes.plan.form", "tir_passes.emit.cpu_rows.choices"})


def _defines_a_pass(name: str) -> bool:
    """Whether a class or function of the module is decorated to be a pass of TVM's."""
    marked = [node for node in _nodes(name) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    makers = [item.func if isinstance(item, ast.Call) else item for node in marked for item in node.decorator_list]
    return any(isinstance(maker, ast.Name) and maker.id in PASS_MAKERS for maker in makers)


@functools.cache
def _passes() -> frozenset[str]:
    return frozenset(name for name in MODULES if _defines_a_pass(name))


def test_no_pass_imports_another() -> None:
    assert {name: found for name in _passes() if (found := _ours(name) & _passes())} == {}


def test_passes_are_known_by_their_decorator() -> None:
    assert _passes() > {"tir_passes.construct_kernels", "tir_passes.split_rtasks"}
    assert "tir_passes.plan.form" not in _passes()
    modules = {name for name in TIR_MODULES if name.count(".") == 1 and MODULES[name].name != "__init__.py"}
    assert modules <= _passes()


def test_the_package_needs_nothing_of_the_repository() -> None:
    outside = {"tests", "benchmarks", "examples"}
    assert not {(name, item) for name in MODULES for item in _imports(name) if item.split(".")[0] in outside}


def test_every_named_exception_is_needed() -> None:
    unused = [pair for pair in CROSSINGS | CIRCLES if pair[0] not in MODULES or pair[1] not in _ours(pair[0])]
    assert not unused
    assert all(_inside_tvm(name) for name in INSIDE_TVM)
    assert set(SOURCES) >= set(ENVIRONMENT_READERS)


@functools.cache
def _siblings() -> dict[str, dict[str, set[str]]]:
    """By folder: what lies in it (modules, folders as a whole), and which of its neighbours each of them imports."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for importer in MODULES:
        for imported in _ours(importer):
            if imported == "__init__" or importer == "__init__" or (importer, imported) in CIRCLES:
                continue
            own, other = importer.split("."), imported.split(".")
            common = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
            if common is not None:  # else one of them is the folder's __init__
                graph = graphs.setdefault(".".join(own[:common]), {})
                graph.setdefault(own[common], set()).add(other[common])
    return graphs


def test_no_neighbours_import_each_other_in_a_circle() -> None:
    assert {"", "runtime", "tir_passes"} < set(_siblings())
    for graph in _siblings().values():
        graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_a_circle_is_found() -> None:
    closed = {name: set(imported) for name, imported in _siblings()["runtime"].items()}
    closed["graph_module"].add("library")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(closed).prepare()


def _inside_tvm(name: str) -> set[str]:
    imported = {item for item in _imports(name) if item.split(".")[0] == "tvm" and item.count(".")}
    return {item for item in imported if item not in TOP_LEVEL_TVM and not item.startswith("tvm.script")}


def test_names_inside_tvm_are_in_one_module() -> None:
    others = [name for name in SOURCES if name != "_tvm" and name not in INSIDE_TVM]
    assert {name: found for name in others if (found := _inside_tvm(name))} == {}, "take these from tvm_ext._tvm"


def test_only_options_reads_the_environment() -> None:
    assert _reads_environment("options")
    assert [name for name in SOURCES if name not in ENVIRONMENT_READERS and _reads_environment(name)] == []


def _reads_environment(name: str) -> bool:
    names = (node for node in _nodes(name) if isinstance(node, ast.Attribute))
    attributes = {(node.value.id, node.attr) for node in names if isinstance(node.value, ast.Name)}
    return bool(attributes & {("os", "environ"), ("os", "getenv"), ("os", "environb"), ("os", "putenv")})


def test_no_blanket_except() -> None:
    caught = [(name, node.type) for name in SOURCES for node in _nodes(name) if isinstance(node, ast.ExceptHandler)]
    assert len(caught) > 100
    assert [name for name, kind in caught if kind is None] == []
    blanket = ("Exception", "BaseException")
    assert [name for name, kind in caught if isinstance(kind, ast.Name) and kind.id in blanket] == []
