"""Holds the documentation to what exists: what README.md, docs/, docstrings and comments name.

In backticks: a path (it ends in a suffix or a slash) must be the end of a path of the repository, `gpu_rows/emit.py` is
one; `module.py: name` and `module.Class` must be defined there; a class must occur in the package's code. Anywhere:
dotted names of `tvm_ext`, `tests` and `benchmarks`; of `tvm_ext` they may be attributes or options, which are strings.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source_trees import parsed
from tvm_ext.options import BuildOptions

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tvm_ext", "tests", "benchmarks", "examples", "docs", "cmake")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "tvm_ext").rglob("*.py"))

FOREIGN = frozenset({"onnx"})
"""Packages of others that a folder of ours is called after."""

SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
COMMENT = re.compile(r"^(?:.*  | *)# (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([\w./-]+\.\w+)\)")
FILE = re.compile(r"([\w.*-]+/)*[\w.*-]+\.(py|md|cu|cl|ipynb|toml)|([\w.*-]+/)+[\w.*-]+\.(json|txt|csv|png|tir|c|cc)")
FOLDER = re.compile(r"([a-z_][\w.-]*/)+")
MADE = re.compile(r"build/|[A-Z_]+\.py")
"""What commands make, and placeholders: MODULE.py."""
NAMES = re.compile(r"([\w./-]+\.py): (\w+(?:, \w+)*)")
MEMBER = re.compile(r"([a-z]\w*)\.([A-Z]\w*)(?:\.(\w+))?(?:\(.*\))?")
CLASS = re.compile(r"_?[A-Z]\w*[a-z][A-Z]\w*")
DOTTED = re.compile(r"(?<![\w./-])(?:tvm_ext|tests|benchmarks)(?:\.[a-zA-Z_]\w*)+")


def _paths() -> frozenset[str]:
    """Of files and of the folders they are in, which end in a slash: a folder may outlive its sources as a cache."""
    files = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    found = [path.relative_to(ROOT) for path in files if path.is_file() and "__pycache__" not in path.parts]
    folders = {f"{folder.as_posix()}/" for path in found for folder in path.parents}
    return frozenset({path.as_posix() for path in found} | folders)


PATHS = _paths()


@functools.cache
def _matches(path: str) -> list[str]:
    """Paths of the repository that end in ``path``, which may have stars."""
    if "*" in path:
        return [known for known in PATHS if fnmatch.fnmatchcase(f"/{known}", f"*/{path}")]
    return [known for known in PATHS if f"/{known}".endswith(f"/{path}")]


@functools.cache
def _defined(path: str) -> frozenset[str]:
    """All names that a module defines or imports, those inside classes and functions too."""
    found = set()
    for node in ast.walk(parsed(ROOT / path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return frozenset(found)


@functools.cache
def _words() -> frozenset[str]:
    """Identifiers of the package and the benchmarks, and words and dotted names in strings of one line."""
    found = {f"tvm_ext.{option}" for option in BuildOptions.__dataclass_fields__}
    for path in (*SOURCES, *(ROOT / "benchmarks").glob("*/*.py")):
        for node in ast.walk(parsed(path)):
            found.update(getattr(node, field, None) or "" for field in ("id", "name", "attr"))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                found.update(re.findall(r"tvm_ext\.\w+|\w+", node.value))
    return frozenset(found)


def _exists(dotted: str) -> bool:
    """Whether ``dotted`` is a module, or a name in one: `tvm_ext.records.rprogram.RTile`."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        folder, rest = "/".join(parts[:length]), parts[length:]
        for module in (f"{folder}.py", f"{folder}/__init__.py"):
            if module in PATHS:
                return set(rest) <= _defined(module) or dotted in _words()
        if f"{folder}/" in PATHS and not rest:
            return True
    return False


def _member_exists(module: str, names: set[str]) -> bool:
    """Whether a module or folder of that name defines them all; True of what is no module of ours."""
    found = [path for end in (f"{module}.py", f"{module}/__init__.py") for path in _matches(end)]
    return not found or module in FOREIGN or any(names <= _defined(path) for path in found)


def _is_known(span: str) -> bool:
    """Whether what stands in backticks is there, where it is of a form that says so."""
    if names := NAMES.fullmatch(span):
        return any(set(names[2].split(", ")) <= _defined(path) for path in _matches(names[1]))
    if member := MEMBER.fullmatch(span):
        return _member_exists(member[1], {name for name in member.groups()[1:] if name})
    return not CLASS.fullmatch(span) or span in _words()


def _unknown(text: str) -> Iterator[str]:
    """What ``text`` names and the repository has not."""
    yield from (name for name in DOTTED.findall(text) if not _exists(name))
    for span in (" ".join(found[1].split()) for found in SPAN.findall(text)):
        if not _is_known(span):
            yield span
        for word in (word.removeprefix("../") for word in re.split(r"[\s:]+", span)):
            is_path = (FILE.fullmatch(word) or FOLDER.fullmatch(word)) and not MADE.match(word)
            if is_path and not _matches(word):
                yield word


def _prose(path: Path) -> str:
    """Docstrings and comments of a module, those below a name's definition too."""
    expressions = (node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Expr))
    texts = [item.value for item in expressions if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    comments = COMMENT.findall(path.read_text(encoding="utf-8"))
    return "\n\n".join([*texts, "\n".join(comments)])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not list(_unknown(text))
    assert not [link for link in LINK.findall(text) if not (page.parent / link).exists()]


def test_what_docstrings_and_comments_name_exists() -> None:
    unknown = {str(path.relative_to(ROOT)): list(_unknown(_prose(path))) for path in SOURCES}
    assert {path: names for path, names in unknown.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        "`records/choices.py`",
        "`tvm_ext/passes/`",
        "`benchmarks/results/*-no-such-measurement.json`",
        "`python benchmarks/no_such_benchmark.py --plot docs/ablation.png`",
        "`records/choice.py: KernelChoice, NoSuchClass`",
        "`plan.KernelChoice`",
        "`NoSuchClass`",
        "run tvm_ext.no_such_module now",
        "tvm_ext.records.choice.NoSuchClass",
        "python -m tests.support.no_such_tool",
    ],
)
def test_what_is_gone_is_found(text: str) -> None:
    assert len(list(_unknown(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "`records/choice.py`, `tvm_ext/records/`, `python dev.py test`, `/proc/cpuinfo`, `x / 0`",
        "`records/choice.py: KernelChoice`, `choice.KernelChoice`, ``KernelChoice``, `onnx.ModelProto`",
        "tvm_ext.records.choice.KernelChoice, the option tvm_ext.candidates, and the end of tvm_ext.",
    ],
)
def test_what_exists_is_known(text: str) -> None:
    assert not list(_unknown(text))
