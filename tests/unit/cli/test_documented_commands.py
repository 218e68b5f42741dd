"""Every line ``tvm-ext ...`` of the README and the manual names a command and options that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from tvm_ext.cli.app import app

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
GROUP = typer.main.get_command(app)
LINES = sorted(
    {
        (page.name, line.strip())
        for page in PAGES
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
        if re.match(r"\s*(\$ )?tvm-ext ", line)
    }
)


@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_documented_command_is_there(page: str, line: str) -> None:
    words = shlex.split(line.removeprefix("$ "), comments=True)[1:]
    command: click.Command = GROUP
    while isinstance(getattr(command, "commands", None), dict):
        own = {option for parameter in command.params for option in parameter.opts}
        while words and words[0] in own:
            words.pop(0)
        if not words or words[0].isupper():
            return  # a placeholder, or an option that ends the command
        assert words[0] in command.commands, f"{page}: there is no command {words[0]!r}"  # type: ignore[attr-defined]
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    known = {name for item in command.params for name in (*item.opts, *item.secondary_opts)} | {"--help"}
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    assert not unknown, f"{page}: {command.name} has no {unknown}"


def test_every_command_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    assert len(LINES) > 20
    assert [name for name in GROUP.commands if f"tvm-ext {name}" not in guide] == []  # type: ignore[attr-defined]
