"""Mutants of the emitters, and whether a kept hash notices: ``python -m tests.golden.mutants --count 100``.

A mutant has one operator, comparison or number of one function changed. It lives in a child process, which emits the
kernels that run that function until one of them has another hash, or fails.
"""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Annotated, Any

import typer
from rich.progress import track

from tests.golden.graphs import HashedKernels
from tests.golden.hashed import all_hashed, digest
from tvm_ext.tir_passes import emit

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
LIMIT_S = 120
Place = tuple[str, int]  # a function: its file and first line


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """The ``number``-th change that `changes` lists of a module, in the function at ``place``."""

    module: str
    number: int
    place: Place
    what: str

    def __str__(self) -> str:
        return f"{Path(self.place[0]).parent.name}/{Path(self.place[0]).name}: {self.what}"


def emitters() -> list[ModuleType]:
    names = [item.name for item in pkgutil.walk_packages(emit.__path__, f"{emit.__name__}.") if not item.ispkg]
    return [importlib.import_module(name) for name in names]


def changes(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, ast.AST]]:
    """The nodes that a mutant may change, each with the function of the module or class that it lies in."""
    for outer in ast.walk(tree):
        if not isinstance(outer, (ast.Module, ast.ClassDef)):
            continue
        for function in (item for item in outer.body if isinstance(item, ast.FunctionDef)):
            for statement in function.body:
                if isinstance(statement, ast.If) and any(isinstance(item, ast.Raise) for item in statement.body):
                    continue  # what an emitter refuses changes no kernel
                yield from ((function, node) for node in ast.walk(statement) if _changes(node))


def _changes(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    operator = getattr(node, "op", None) or next(iter(getattr(node, "ops", [])), None)
    return isinstance(node, (ast.BinOp, ast.Compare, ast.BoolOp)) and type(operator) in SWAPS


def _change(node: Any) -> None:
    if isinstance(node, ast.Constant):
        node.value += 1
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    else:
        node.op = SWAPS[type(node.op)]()


def mutants_of(module: ModuleType) -> list[Mutant]:
    path = str(module.__file__)
    found = []
    for number, (function, node) in enumerate(changes(ast.parse(Path(path).read_text(encoding="utf-8")))):
        first = min([function.lineno, *(item.lineno for item in function.decorator_list)])
        what = f"line {node.lineno}, {function.name}: {ast.unparse(node)}"  # type: ignore[attr-defined]
        found.append(Mutant(module=module.__name__, number=number, place=(path, first), what=what))
    return found


def apply(mutant: Mutant) -> None:
    """Gives the functions of the mutant's module their changed code, wherever they are referred to."""
    module = sys.modules[mutant.module]
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    _change([node for _, node in changes(tree)][mutant.number])
    codes = {_key(code): code for code in _codes(compile(tree, str(module.__file__), "exec"))}
    for function in _functions(module):
        code = codes.get(_key(function.__code__))
        if code is not None and code.co_freevars == function.__code__.co_freevars:
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield item
            yield from _codes(item)


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    own = [item for item in vars(module).values() if getattr(item, "__module__", None) == module.__name__]
    for item in [*own, *(member for found in own if isinstance(found, type) for member in vars(found).values())]:
        function = getattr(item, "__wrapped__", getattr(item, "fget", getattr(item, "__func__", item)))
        if isinstance(function, FunctionType):
            yield function


def places_of(kernels: HashedKernels, folder: str) -> tuple[set[Place], str]:
    """The functions below ``folder`` that run while the kernels are emitted, and their hash."""
    found: set[Place] = set()

    def note(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            found.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    sys.setprofile(note)
    try:
        return found, digest(kernels.emit())
    finally:
        sys.setprofile(None)


def is_noticed(mutant: Mutant, kernels: list[HashedKernels], hashes: dict[str, str]) -> bool:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.alarm(LIMIT_S)
    try:
        apply(mutant)
        same = all(digest(item.emit()) == hashes[str(item)] for item in kernels)
    except BaseException:  # noqa: BLE001 - what fails is noticed, whatever it is
        same = False
    os._exit(0 if same else 1)


def main(
    count: Annotated[int, typer.Option(min=1, help="How many mutants, drawn evenly over the modules.")] = 100,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Draw mutants and list those that no hash notices."""
    modules = emitters()
    folder = str(Path(emit.__path__[0]))
    ran: dict[Place, list[HashedKernels]] = {}
    hashes: dict[str, str] = {}
    for kernels in track(all_hashed(), "kernels", transient=True):
        places, hashes[str(kernels)] = places_of(kernels, folder)
        for place in places:
            ran.setdefault(place, []).append(kernels)
    generator = random.Random(seed)
    drawn = [
        generator.choice(found) for _ in range(-(-count // len(modules))) for m in modules if (found := mutants_of(m))
    ]
    unseen = [mutant for mutant in drawn[:count] if mutant.place not in ran]
    run = [mutant for mutant in drawn[:count] if mutant.place in ran]
    missed = [m for m in track(run, "mutants", transient=True) if not is_noticed(m, ran[m.place], hashes)]
    for title, found in (("in functions that no kernel runs", unseen), ("noticed by no hash", missed)):
        print(f"{len(found)} of {len(drawn[:count])} mutants {title}")
        for mutant in found:
            print(f"  {mutant}")


if __name__ == "__main__":
    typer.run(main)
