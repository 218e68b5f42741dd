"""Commands that get Ctrl-C at a moment of their run: how they end and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.quick_imports import PATH_WITHOUT_TORCH
from tvm_ext.runtime.export import check_seal

LIMIT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
_MARK = "TVM_EXT_TEST_MARK"
_OF_OTHERS = (".ses",)  # ONNX Runtime writes it into the temporary folder whenever it is imported
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a command ended: the exit code as a shell gives it; what it left; seconds from the signal to the end.

    ``busy_s`` is the processor time that the process and its children used after the signal.
    """

    code: int | None  # None: it had to be killed
    left: tuple[str, ...]
    after_s: float
    busy_s: float
    output: str


def run_for(command: Sequence[str], after_s: float | None, *, group: bool = False) -> Ending:
    """Run ``tvm-ext command`` in an empty folder with an empty cache, and interrupt it after ``after_s`` seconds.

    ``group`` sends the signal to its process group, as a terminal does, else to the process alone. None: no signal.
    """
    with tempfile.TemporaryDirectory(prefix="interrupted-") as name:
        folders = {kind: Path(name, kind) for kind in ("work", "temporary", "cache")}
        for folder in folders.values():
            folder.mkdir()
        mark = uuid.uuid4().hex
        environment = {
            **os.environ, "PYTHONPATH": PATH_WITHOUT_TORCH, "TMPDIR": str(folders["temporary"]), _MARK: mark,
            "TVM_EXT_CACHE_DIR": str(folders["cache"]), "TVM_EXT_KERNEL_CACHE": "auto",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-c", "from tvm_ext.cli.app import main; main()", *command],
            cwd=folders["work"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        return _interrupt(process, after_s, group, folders, mark)


def _interrupt(
    process: subprocess.Popen[str], after_s: float | None, group: bool, folders: dict[str, Path], mark: str
) -> Ending:
    try:
        output, _ = process.communicate(timeout=after_s if after_s is not None else 10 * LIMIT_S)
        return Ending(code=process.returncode, left=(), after_s=0.0, busy_s=0.0, output=output)
    except subprocess.TimeoutExpired:
        busy_then_s = _busy_s(mark)
    start, children = time.monotonic(), os.times()
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    now = os.times()
    used_s = now.children_user + now.children_system - children.children_user - children.children_system
    return Ending(
        code=128 - code if code is not None and code < 0 else code,  # a shell says 130 of SIGINT
        left=tuple(_left(folders, mark)),
        after_s=time.monotonic() - start,
        busy_s=max(0.0, used_s - busy_then_s),
        output=output,
    )


def _left(folders: dict[str, Path], mark: str) -> list[str]:
    """Files that should not be there, and processes that should have ended. Whole results may be there."""
    left = [str(path) for path in folders["temporary"].rglob("*") if path.name not in _OF_OTHERS]
    left += [str(path) for path in folders["work"].rglob("*") if not _is_whole(path)]
    left += [str(path) for path in folders["cache"].rglob("*") if path.is_file() and path.name.startswith(".")]
    return left + [f"process {number}" for number in _marked(mark)]


def _is_whole(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    if path.suffix == ".json":
        return isinstance(json.loads(path.read_text()), dict)
    if path.suffix == ".html":
        return path.read_text().rstrip().endswith("</html>")
    return path.suffix == ".so" and check_seal(path) != ""  # raises where it was changed


def _marked(mark: str) -> list[int]:
    """The processes that the command has started, itself included."""
    text = f"{_MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            if text in path.read_bytes() and process_state(path.parent)[:1] not in ([], ["Z"]):
                found.append(int(path.parent.name))
    return found


def process_state(process: Path) -> list[str]:
    """The fields of proc(5)'s ``stat`` behind the name: state, parent, group, ...; none for one that has ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _busy_s(mark: str) -> float:
    """Processor time so far of the command and what it started."""
    total = 0.0
    for number in _marked(mark):
        fields = process_state(Path("/proc", str(number)))
        total += _TICK_S * sum(map(int, fields[11:15]))  # user, system, and the same of children that ended
    return total
