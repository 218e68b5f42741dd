"""The parts of `dev.py` that can be had without installing anything."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dev

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
    ],
)
def test_an_incomplete_wheel_is_refused(tmp_path: Path, name: str, left_out: str, problem: str) -> None:
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tvm_ext").rglob("*.py")]
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        for member in {*modules, *(f"tvm_ext/lib/{part}.so" for part in dev.NATIVE_PARTS)} - {left_out}:
            archive.writestr(member, "")
    with pytest.raises(dev.SetupError, match=problem):
        dev._check_wheel(tmp_path / name)
