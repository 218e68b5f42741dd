"""The parts of `dev.py` that can be had without installing anything."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dev
from tests.support import extras

ROOT = Path(dev.__file__).resolve().parent


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(dev.SetupError, match=r"no C\+\+ compiler.*apt-get install g\+\+"):
        dev._check_machine()


def test_an_old_python_is_told_which_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(dev.SetupError, match=r"Python 3\.10 or newer is needed, this is 3\.9"):
        dev._check_machine()


def test_an_error_is_a_message_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert dev.main(["test"]) == 2
    assert capsys.readouterr().err.startswith("error: no C++ compiler")


def test_a_python_without_venv_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        Path(command[-1]).mkdir()
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(dev.SetupError, match="python3-venv"):
        dev.make_environment(tmp_path / "venv")
    assert not (tmp_path / "venv").exists()


def _small_tree(root: Path) -> None:
    (root / "tvm_ext" / "csrc").mkdir(parents=True)
    for name in ("pyproject.toml", "CMakeLists.txt", "tvm_ext/csrc/pass_config.cc", "tvm_ext/relay.py"):
        (root / name).write_text("one")


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("pyproject.toml", True),
        ("tvm_ext/csrc/pass_config.cc", True),
        ("tvm_ext/csrc/new.cc", True),
        ("tvm_ext/relay.py", False),
    ],
)
def test_only_requirements_and_native_sources_ask_for_an_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, again: bool
) -> None:
    _small_tree(tmp_path)
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    before = dev._fingerprint()
    assert dev._fingerprint() == before
    (tmp_path / name).write_text("two")
    assert (dev._fingerprint() != before) == again


def test_nothing_is_installed_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _small_tree(tmp_path)
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(dev, "make_environment", lambda folder: folder.mkdir())
    monkeypatch.setattr(dev, "run_in", lambda _venv, *command, **_options: commands.append(command) or 0)
    dev.install()
    assert any("--editable" in command for command in commands)
    commands.clear()
    dev.install()
    assert not commands


def test_a_failed_installation_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _small_tree(tmp_path)
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(dev, "make_environment", lambda folder: folder.mkdir(exist_ok=True))
    monkeypatch.setattr(dev, "run_in", lambda *_command, **_options: 1)
    for _ in range(2):
        with pytest.raises(dev.SetupError, match="this command failed"):
            dev.install()


@pytest.mark.parametrize(
    ("arguments", "expression"),
    [
        ([], "not slow and not gpu and not browser"),
        (["--slow"], "not gpu and not browser"),
        (["--slow", "--gpu", "--browser"], None),
    ],
)
def test_markers_follow_the_flags(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expression: str | None
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(dev, "install", lambda: None)
    monkeypatch.setattr(dev, "run_in", lambda _venv, *command: commands.append(command) or 0)
    assert dev.main(["test", *arguments, "-x", "tests/unit"]) == 0
    (command,) = commands
    assert command[-2:] == ("-x", "tests/unit")
    options = command[command.index("pytest") + 1 : -2]
    assert options == (*dev.SIDE_BY_SIDE, *(("-m", expression) if expression else ()))


@pytest.mark.parametrize(
    ("name", "left_out", "problem"),
    [
        ("tvm_ext-1-cp311-cp311-linux_x86_64.whl", "", "not a wheel for every Python 3"),
        ("tvm_ext-1-py3-none-linux_x86_64.whl", "tvm_ext/errors.py", "lacks tvm_ext/errors.py"),
        ("tvm_ext-1-py3-none-linux_x86_64.whl", "tvm_ext/lib/libtvm_ext_options.so", "lacks libtvm_ext_options"),
        ("tvm_ext-1-py3-none-linux_x86_64.whl", "tvm_ext/lib/libtvm_ext_rammer.so", "lacks libtvm_ext_rammer"),
        ("tvm_ext-1-py3-none-linux_x86_64.whl", "tvm_ext/lib/tvm_ext_weights_loader.o", "lacks tvm_ext_weights_loader"),
    ],
)
def test_an_incomplete_wheel_is_refused(tmp_path: Path, name: str, left_out: str, problem: str) -> None:
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tvm_ext").rglob("*.py")]
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        suffixes = {part: "so" if part.startswith("lib") else "o" for part in dev.NATIVE_PARTS}
        for member in {*modules, *(f"tvm_ext/lib/{part}.{suffixes[part]}" for part in suffixes)} - {left_out}:
            archive.writestr(member, "")
    with pytest.raises(dev.SetupError, match=problem):
        dev._check_wheel(tmp_path / name)


# --- extras -----------------------------------------------------------------------------------------------------------
def test_every_extra_has_commands_and_a_row_in_the_guide() -> None:
    section = re.split(r"^\[.*\]$", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    (declared,) = [set(re.findall(r"^(\w+) = \[", text, re.MULTILINE)) for text in section if "\ncutlass = [" in text]
    rows = set(
        re.findall(r"^\| `(\w+)` \| ", (ROOT / "docs/guide.md").read_text().partition("| extra |")[2], re.MULTILINE)
    )
    assert declared == set(extras.EXTRAS) - {""}
    assert declared <= rows


@pytest.mark.parametrize("name", extras.EXTRAS)
def test_what_is_tried_of_an_extra_is_documented(name: str) -> None:
    assert extras.EXTRAS[name]
    for item in extras.EXTRAS[name]:
        assert item.text in (ROOT / item.page).read_text(), f"{item.page} does not have {item.text!r}"
        assert not item.script or item.more == ""


def test_a_script_ends_with_its_first_failure_and_with_what_it_has_started(tmp_path: Path) -> None:
    def run(*commands: extras.Documented) -> subprocess.CompletedProcess[str]:
        script = extras.shell_script(commands).replace("python make_model.py", "true")
        return subprocess.run(
            ["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=10, check=False
        )

    sleep = extras.Documented("", "sleep 60", "&")
    done = run(
        sleep, extras.Documented("", "echo", "one"), extras.Documented("", "false"), extras.Documented("", "echo two")
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["+ sleep 60 &", "+ echo one", "one", "+ false "]
    assert run(extras.Documented("", "it", script="print(6 * 7)")).stdout.splitlines()[-1] == "42"


def test_extras_are_tried_each_in_its_own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[tuple[str, ...]] = []

    def run_in(environment: Path, *command: str, **_options: object) -> int:
        commands.append((str(environment), *command))
        return int(command[0] == "/bin/sh" and "rpc_servers" in command[2])

    monkeypatch.setattr(dev, "run_in", run_in)
    monkeypatch.setattr(dev, "make_environment", lambda folder: folder.mkdir())
    assert dev._environments(None) == [("", "rpc")]
    assert ("models",) not in dev._environments([])
    assert dev._environments(["cuda", "models"]) == [("cuda",), ("models",)]
    with pytest.raises(dev.SetupError, match=r"there is no extra cudda; there are .*bench"):
        dev._environments(["cudda"])
    assert dev._try_extras(tmp_path / "a.whl", ("", "bench"))
    assert not dev._try_extras(tmp_path / "a.whl", ("rpc", "bench"))
    assert "'rpc' failed" in capsys.readouterr().err
    installed = [command[-1].removeprefix(f"{tmp_path}/") for command in commands if "install" in command]
    assert installed == ["a.whl", "a.whl[bench]", "a.whl[rpc]"]
    assert len({command[0] for command in commands}) == 2
