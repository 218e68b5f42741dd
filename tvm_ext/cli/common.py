"""What the commands share: reading arguments, loading models, progress on the error stream."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tvm_ext.errors import InputError, ModelError, OptionError
from tvm_ext.support.files import remove_temporary
from tvm_ext.support.limited_process import end_running

# --- options that several commands have -------------------------------------------------------------------------------
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A file of ONNX, torch.export or TorchScript, or a built-in model's name."),
]
Target = Annotated[str, typer.Option(help="TVM target or device name; 'llvm' is this machine's CPU.")]
ShapeOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=SIZES", help="An input's shape, e.g. x=1,3,224,224 or ids=1,8:int64.")
]
Batch = Annotated[int, typer.Option(min=1, help="Batch of a built-in model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of text.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of random inputs, or of a search.")]
Reports = Annotated[list[Path] | None, typer.Option(help="Also write the build report: .html, else JSON.")]
Gpu = Annotated[str, typer.Option(help="A GPU of the tables (see `tvm-ext devices`).")]
DEFAULT_GPU = "nvidia-a100"
Precision = Annotated[str, typer.Option(help="float16: convert a float32 model to half precision; keep: leave it.")]

# --- The options of ``tvm-ext compile`` that switch a build's features; left out, a build's defaults hold -------------
Products = Annotated[
    str | None,
    typer.Option("--precision", help="Of products on CPUs: bfloat16, auto, bfloat16-emulated. Default: float32."),
]
Bound = Annotated[
    float | None, typer.Option("--precision-bound", help="Largest error of an output by --precision, measured.")
]
Layout = Annotated[str | None, typer.Option(help="Between convolutions: auto, NCHW, NCHWc (CPUs), NHWC (GPUs).")]
ThreadCount = Annotated[int | None, typer.Option(min=1, help="CPU cores that kernels are divided among. Default: all.")]
Pipelining = Annotated[
    str | None, typer.Option(help="How far GPU kernels load ahead: off, double, multistage, full. Default: full.")
]
CandidateCount = Annotated[int | None, typer.Option(min=1, help="How many rPrograms construction keeps. Default: 10.")]
Roller = Annotated[bool, typer.Option("--roller/--no-roller", help="Construct kernels, or leave them to stock TVM.")]
Persistent = Annotated[
    bool | None,
    typer.Option("--persistent/--no-persistent", help="Products in a chain as one kernel. Default: where it pays."),
]
Cutlass = Annotated[
    bool | None, typer.Option("--cutlass/--no-cutlass", help="CUTLASS templates for products (CUDA). Default: off.")
]
Rammer = Annotated[
    bool | None, typer.Option("--rammer/--no-rammer", help="One schedule of many operators (CPUs, CUDA). Default: off.")
]

Open = Annotated[
    list[str] | None,
    typer.Option("--open", metavar="DIM=SIZES", help="A dimension that stays open: batch=1:32, or seq=16,64,128."),
]


def build_settings(
    layout: str | None = None,
    threads: int | None = None,
    pipelining: str | None = None,
    candidates: int | None = None,
    precision: str | None = None,
    precision_bound: float | None = None,
) -> dict[str, Any]:
    """Fields of `BuildOptions` that options of a command set; those that were left out are not among them."""
    ahead = {"enable_pipelining": False} if pipelining == "off" else {"pipelining": pipelining}
    fields: dict[str, Any] = {"layout": layout, "num_threads": threads, "candidates": candidates}
    fields |= {"precision": precision, "precision_bound": precision_bound, **ahead}
    return {name: value for name, value in fields.items() if value is not None}


def say_version(asked: bool) -> None:
    """Print the versions of this package and of what it works with, and end."""
    if asked:
        from tvm_ext._environment import installed_version

        names = ("tvm_ext", "apache-tvm", "apache-tvm-ffi", "onnx", "numpy")
        typer.echo("\n".join(f"{name} {installed_version(name) or 'not installed'}" for name in names))
        raise typer.Exit


# --- reading arguments -----------------------------------------------------------------------------------------------
InputShapes = dict[str, list[int]]
_TYPED = re.compile(r"=([0-9x, ]*):([a-z]+[0-9]*)$")


def parse_shapes(texts: Sequence[str] | None) -> InputShapes:
    """``["input=1,3,224,224"]`` as a dict; raises OptionError for anything else. ``input=`` is a scalar."""
    return dict(_parse_shape(_TYPED.sub(r"=\1", text)) for text in texts or ())


def parse_types(texts: Sequence[str] | None) -> dict[str, str]:
    """``["ids=1,128:int64"]`` as ``{"ids": "int64"}``; inputs without a type are left out."""
    return {text[: found.start()]: found[2] for text in texts or () if (found := _TYPED.search(text))}


def _parse_shape(text: str) -> tuple[str, list[int]]:
    # Names may contain "=", sizes cannot: split at the last one.
    name, separator, sizes = text.rpartition("=")
    numbers = [size.strip() for size in sizes.replace("x", ",").split(",") if size.strip()]
    if not separator or not name or not all(number.isdigit() for number in numbers):
        raise OptionError(
            f"--shape {text!r} is not of the form NAME=SIZE,SIZE,...", "write e.g. --shape input=1,3,224,224"
        )
    return name, [int(number) for number in numbers]


def parse_open(texts: Sequence[str] | None) -> dict[str, tuple[int, int] | list[int]]:
    """``["batch=1:32", "seq=16,64"]`` as `relay.build_open` takes it; raises OptionError for anything else."""
    found: dict[str, tuple[int, int] | list[int]] = {}
    for text in texts or ():
        name, _, sizes = text.rpartition("=")
        low, colon, high = sizes.partition(":")
        numbers = [low, high] if colon else sizes.split(",")
        if not name or not all(number.strip().isdigit() for number in numbers):
            raise OptionError(f"--open {text!r} is not known.", "write e.g. --open batch=1:32 or --open seq=16,64,128")
        found[name] = (int(low), int(high)) if colon else [int(number) for number in numbers]
    return found


def load_model(model: str, batch: int = 1) -> Any:
    """The path of a model file, or the ONNX model of a built-in name; raises ModelError for neither."""
    check_model(model)
    if Path(model).exists():
        return model
    from tvm_ext.bench import models

    return models.build_model(model, batch)


def check_alone(name: str, others: Mapping[str, object]) -> None:
    """Raise OptionError where one of the options ``others`` has a value, which ``name`` goes without."""
    if any(others.values()):
        *most, last = others
        raise OptionError(f"{name} goes without {', '.join(most)} and {last}.", "leave them out")


def import_model(model: str, shape: list[str] | None, batch: int = 1) -> Any:
    """Module and parameters of a model file or a built-in name, its inputs in the shapes that ``--shape`` gives."""
    from tvm_ext import relay
    from tvm_ext.relay_passes.pytorch.read_file import is_torch_file

    shapes, types = parse_shapes(shape) or None, parse_types(shape) or None
    if Path(model).is_file() and is_torch_file(model):
        return relay.frontend.from_torch(model, shapes, types)
    return relay.frontend.from_onnx(load_model(model, batch), shape=shapes, dtype=types)


def require_precision(dtype: str) -> bool:
    """Whether ``--dtype`` asks for half precision; raises OptionError for another word."""
    if dtype not in ("float16", "keep"):
        raise OptionError(f"--dtype {dtype!r} is not known.", "write float16 or keep")
    return dtype == "float16"


def nearest(name: str, known: Iterable[str]) -> str:
    """What an error says of a ``name`` that is none of ``known``: those that resemble it, else all."""
    names = list(known)
    return f"did you mean {', '.join(difflib.get_close_matches(name, names, n=5, cutoff=0.3) or names)}?"


def check_model(model: str) -> None:
    """Raise ModelError unless ``model`` is there, or a built-in name."""
    from tvm_ext.bench import models

    if Path(model).exists() or model in models.NAMES:
        return
    nearest = difflib.get_close_matches(model, models.NAMES, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise ModelError(
        f"{model!r} is neither a file nor a built-in model.", f"{hint}The built-in models are {', '.join(models.NAMES)}"
    )


def read_inputs(texts: Sequence[str]) -> dict[str, Any]:
    """Arrays from ``NAME=file.npy`` and ``file.npz``; raises InputError for a file that cannot be read."""
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        if not separator and not text.endswith(".npz"):
            raise InputError(
                f"--input {text!r} is not of the form NAME=FILE.npy.", "write NAME=FILE.npy, or a FILE.npz"
            )
        loaded = _load_array(path if separator else text)
        if isinstance(loaded, Mapping):
            values.update(loaded)
        else:
            values[name] = loaded
    return values


def _load_array(path: str) -> Any:
    try:
        loaded = np.load(path, allow_pickle=False)
        return dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"{path} cannot be read as a NumPy file: {error}.", "write it with numpy.save or numpy.savez"
        ) from error


INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the signal's number."""

_TIME_TO_REACT_S = 0.5  # a choice: Python's own handler of Ctrl-C acts within it, unless native code is running


class Interrupts:
    """Ctrl-C that cannot get lost and does not have to wait.

    Python raises KeyboardInterrupt when the main thread is back from C++, be it seconds later, and wherever it then
    happens to be; where that is in a destructor or in a callback from C, the error is printed and dropped.
    """

    def __init__(self) -> None:
        self._came = False
        self._raised = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts, Ctrl-C is remembered for `check`, and ends the process where its main thread cannot react.

        Elsewhere than in the main thread nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.signal(signal.SIGINT, self._remember), signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before[1])
            signal.signal(signal.SIGINT, before[0])
            os.close(writer)  # ends the watcher
            watcher.join()

    def _watch(self, reader: int) -> None:
        """Wait for signals: the system writes their numbers to a pipe even while Python itself cannot run."""
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] == signal.SIGINT and not self._raised.wait(_TIME_TO_REACT_S):
                    leave_at_once(INTERRUPTED)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        self._raised.set()
        signal.default_int_handler(number, frame)

    def check(self) -> None:
        """Raise KeyboardInterrupt where Ctrl-C came and the work goes on all the same."""
        if self._came:
            self._came = False
            raise KeyboardInterrupt


interrupts = Interrupts()


def leave_at_once(code: int) -> NoReturn:
    """End the process without waiting for threads that are in C++: nothing stops LLVM, and it takes seconds."""
    end_running()
    remove_temporary()
    with contextlib.suppress(BrokenPipeError):  # of `| head`
        sys.stdout.flush()
        sys.stderr.flush()
    atexit._run_exitfuncs()  # TVM's temporary folders
    os._exit(code)


class Steps:
    """A long piece of work's progress: ``begin`` starts its next step, ``detail`` says what the step is doing."""

    def __init__(self, progress: Progress, count: int) -> None:
        self._progress, self._title, self._begun, self._details = progress, "", -1, 0
        self._task = progress.add_task("", total=count)

    def begin(self, title: str) -> None:
        interrupts.check()
        self._title, self._begun, self._details = title, self._begun + 1, 0
        self._progress.update(self._task, description=title, completed=self._begun)

    def detail(self, text: str) -> None:
        """Moves the bar: passes, whose number nobody knows, through half of the step, kernels through the other."""
        interrupts.check()
        self._details += 1
        counted = re.match(r"kernel (\d+) of (\d+)", text)
        share = 0.5 * (1 - 0.97**self._details) if counted is None else 0.5 + 0.5 * int(counted[1]) / int(counted[2])
        self._progress.update(self._task, description=f"{self._title}: {text}", completed=self._begun + share)


@contextlib.contextmanager
def progress_bar(count: int) -> Iterator[Steps]:
    """Shows ``count`` steps on the error stream while it lasts; silent unless that is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn())
    text = TextColumn("{task.description}", markup=False)
    with Progress(*columns, text, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Steps(progress, count)


def output_console() -> Console:
    """On the output stream; wide where that is a file or a pipe, so that no table is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def list_operators(names: Sequence[tuple[str, int]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([{"operator": name, "calls": calls} for name, calls in names]))
        return
    for name, calls in names:
        typer.echo(f"{calls:4} x {name}")
    typer.echo("choose one with --operator NAME", err=True)


def build_model(steps: Steps, model: str, shape: list[str] | None, target: str, batch: int = 1, **settings: Any) -> Any:
    """Import and build, in two steps."""
    from tvm_ext import relay

    steps.begin("importing")
    mod, params = import_model(model, shape, batch)
    steps.begin("building")
    return relay.build(mod, target, params=params, progress=steps.detail, **settings)
