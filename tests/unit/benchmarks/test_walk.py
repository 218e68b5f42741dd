"""docs/walk.md has every command of README, the guide and the command line; `benchmarks/walk.py` makes it."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import typer

from tvm_ext.cli.app import app

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def walk() -> Iterator[ModuleType]:
    folder = str(ROOT / "benchmarks")
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        spec = importlib.util.spec_from_file_location("walk", ROOT / "benchmarks" / "walk.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules["walk"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if name in ("walk", "_common"):
                del sys.modules[name]


def _commands(group: Any, path: str = "tvm-ext") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(getattr(command, "commands", None), dict):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}"


def test_the_page_has_what_the_pages_show_and_nothing_else(walk: ModuleType) -> None:
    """Whoever changes a command of README or guide makes the page anew."""
    steps = [step for own in walk.all_steps().values() for step in own]
    shown = [block.split("\n")[0].partition("  #")[0].strip() for block in PAGE.split("```sh\n")[1:]]
    assert shown == [step.command for step in steps]
    printed = {command: own.text for command, own in walk.outputs_in(PAGE).items()}
    assert [
        step.command for step in steps if not step.not_run and printed.get(step.command) in (None, "(nothing)")
    ] == []


def test_every_command_is_on_the_page() -> None:
    assert [name for name in _commands(typer.main.get_command(app)) if f"\n{name}" not in PAGE] == []


@pytest.mark.parametrize("line", sorted({line for line in PAGE.splitlines() if line.startswith("tvm-ext ")}))
def test_the_pages_commands_parse(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command line does it, with types and required arguments; nothing is run."""
    if line.startswith("tvm-ext --version") or line.removeprefix("tvm-ext ")[0].isdigit():
        return  # an option that ends it; what it prints
    command: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)[1:]
    while isinstance(getattr(command, "commands", None), dict):
        command = command.commands[words.pop(0)]
    context = command.make_context(command.name, words)
    assert isinstance(context, click.Context) or context.params is not None


def test_a_page_keeps_what_was_not_run_again(walk: ModuleType) -> None:
    sections = {"Of X": [walk.Step(command="a", comment="why"), walk.Step(command="b", not_run="it installs")]}
    sections["Others"] = [walk.Step(command=command) for command in "cd"]
    outputs = {command: walk.Printed(text="1\n2", where="today, this one, 2 threads") for command in "acd"}
    outputs["c"] = walk.Printed(text="", where="yesterday, another, 4 threads")
    text = walk.page_of(sections, outputs)
    assert walk.outputs_in(text) == {**outputs, "c": walk.Printed(text="(nothing)", where=outputs["c"].where)}
    assert "```sh\nb\n```\n\nNot run here: it installs." in text
    assert text.count(outputs["c"].where) == text.count(outputs["a"].where) == 1


def test_outputs_are_short_and_name_no_place_of_this_machine(walk: ModuleType, tmp_path: Path) -> None:
    text = walk.shortened(walk.without_paths(f"{tmp_path}/x\n{walk.ROOT}/y\n" + "z\n" * 100, tmp_path))
    assert text.splitlines()[:2] == ["./x", "tvm_ext/y"]
    assert text.splitlines()[-1] == "... 78 more lines"
    assert str(ROOT) not in PAGE and str(Path.home()) not in PAGE


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_command_still_runs(walk: ModuleType, tmp_path: Path) -> None:
    """As on the page: those that end in an error there do so, and no other."""
    page = tmp_path / "walk.md"
    walk.main(output=page)
    failing = [
        {key for key, printed in walk.outputs_in(own).items() if "(exit code" in printed.text}
        for own in (page.read_text(), PAGE)
    ]
    assert failing[0] == failing[1]
