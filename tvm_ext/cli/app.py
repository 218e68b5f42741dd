"""The command ``tvm-ext``: compile, run, bench, explain, advise, tune, profile, verify, devices, database and others.

Results go to the output stream, progress and errors to the error stream. Exit codes: 0 done, 1 a check failed,
2 a wrong argument or input (``error: ...`` and what to do about it), 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_ext.errors import TvmExtError

from .advise import advise
from .cache import cache
from .common import (
    INTERRUPTED,
    Steps,
    check_model,
    interrupts,
    leave_at_once,
    list_operators,
    load_model,
    output_console,
    parse_shapes,
    progress_bar,
    read_inputs,
)
from .database import database
from .profile import profile as profile_templates
from .switches import Cutlass, Persistent, Rammer, Roller
from .tune import tune
from .verify import verify

if TYPE_CHECKING:
    from tvm_ext._tvm import Expr

app = typer.Typer(
    name="tvm-ext",
    help="Compile ONNX models on stock TVM, with kernels that are constructed instead of searched.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or the name of a built-in model.")]
Target = Annotated[str, typer.Option(help="TVM target or device name; 'llvm' is this machine's CPU.")]
ShapeOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=SIZES", help="An input's shape, e.g. input=1,3,224,224.")
]
Batch = Annotated[int, typer.Option(min=1, help="Batch of a built-in model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of a table.")]
Seed = Annotated[int, typer.Option(help="Seed of random inputs.")]


app.command()(advise)
app.command()(cache)
app.command("profile")(profile_templates)
app.command()(tune)
app.command()(verify)
app.add_typer(database, name="database")


@app.callback()
def _settings(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the Python traceback of errors.")] = False,
) -> None:
    context.obj.debug = debug


@app.command()
def compile(
    model: Model,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The library to write. Default: MODEL.so.")
    ] = None,
    target: Target = "llvm",
    shape: ShapeOption = None,
    batch: Batch = 1,
    roller: Roller = True,
    persistent: Persistent = None,
    cutlass: Cutlass = None,
    rammer: Rammer = None,
    report: Annotated[list[Path] | None, typer.Option(help="Also write the build report: .html, else JSON.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Also write --rammer's schedules as a Perfetto trace.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Measure each operator for the report.")] = False,
    keep_times: Annotated[
        bool, typer.Option("--keep-times", help="Measure rTasks and keep their times for later builds.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Interpret GPU kernels; a wrong one is an error.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile a model to a shared library."""
    output = output or Path(f"{Path(model).stem}.so")
    with progress_bar(4) as steps:
        switches = {
            "enable_roller": roller,
            "enable_persistent_fusion": persistent,
            "enable_cutlass": cutlass,
            "enable_rammer": rammer,
        }
        library = _build(steps, load_model(model, batch), shape, target, verify=verify, **switches)
        if profile or keep_times:
            steps.begin("measuring each operator")
            with contextlib.closing(_store()) if keep_times else contextlib.nullcontext() as store:
                library.profile(store=store)
        steps.begin(f"writing {output}")
        library.export_library(output)
        for path in report or []:
            library.report.save(path)
        if trace is not None:
            library.report.save_trace(trace)
    if as_json:
        _print_json(library.report.to_json())
    else:
        _show_report(library.report)
        typer.echo(f"wrote {', '.join(map(str, [output, *(report or []), *([trace] if trace else [])]))}")


@app.command()
def run(
    model: Annotated[
        str, typer.Argument(metavar="LIBRARY|MODEL", help="A compiled library (.so), or a model to compile first.")
    ],
    input: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE.npy", help="An input. Default: seeded random numbers.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write all outputs to this .npz file.")] = None,
    target: Target = "llvm",
    shape: ShapeOption = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Run a library or a model once and show its outputs."""
    from tvm_ext import relay
    from tvm_ext.runtime.library import random_inputs

    with progress_bar(4) as steps:
        if model.endswith((".so", ".dylib", ".dll")):
            steps.begin(f"loading {model}")
            library = relay.load(model)
        else:
            library = _build(steps, load_model(model), shape, target)
        steps.begin("running")
        module = library["default"]()
        module.set_input(**read_inputs(input or []))
        unset = [spec for spec in library.inputs if not module.has_input(spec.name)]
        module.run(**random_inputs(unset, seed))
    results = [module.get_output(index).numpy() for index in range(module.get_num_outputs())]
    names = [spec.name for spec in library.outputs]
    if output is not None:
        _save_outputs(output, names, results)
    _show_outputs(names, results, [spec.name for spec in unset], as_json)


@app.command()
def bench(
    model: Model,
    target: Target = "llvm",
    shape: ShapeOption = None,
    batch: Batch = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each contender, taken in turns.")] = 8,
    peer: Annotated[
        list[str] | None, typer.Option(help="onnxruntime or stock_tvm. Default: all that are installed.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the JSON to this file.")] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Time a model beside ONNX Runtime and stock TVM; contenders take turns."""
    from tvm_ext.bench.compare import bench as measure
    from tvm_ext.records import serialise
    from tvm_ext.support.files import write_atomically

    check_model(model)
    with progress_bar(4) as steps:
        result = measure(
            model,
            batch=batch,
            shape=parse_shapes(shape or []) or None,
            target=target,
            peers=peer,
            rounds=rounds,
            seed=seed,
            progress=steps.begin,
        )
    text = serialise.to_json(result)
    if output is not None:
        write_atomically(output, (text + "\n").encode())
    if as_json:
        _print_json(text)
        return
    console = output_console()
    console.print(result.table())
    for name, reason in result.skipped:
        console.print(f"{name} took no part: {reason}", markup=False)


@app.command()
def explain(
    model: Model,
    operator: Annotated[str | None, typer.Option(help="The operator's name. Default: list all names.")] = None,
    device: Annotated[str, typer.Option(help="Device to construct for (see `tvm-ext devices`).")] = "cpu",
    shape: ShapeOption = None,
    batch: Batch = 1,
    alternatives: Annotated[int, typer.Option(min=0, help="How many slower programs to show.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show how one operator's tiles are constructed, their predicted time, and why the alternatives are slower."""
    from tvm_ext import relay
    from tvm_ext.devices.device_db import lookup
    from tvm_ext.options import BuildOptions
    from tvm_ext.records import serialise

    from .explain import explain as construct_for
    from .explain import operator_names, operators_of
    from .explain_text import render

    spec = lookup(device)
    with progress_bar(2) as steps:
        steps.begin("importing")
        mod, params = relay.frontend.from_onnx(load_model(model, batch), shape=parse_shapes(shape or []) or None)
        steps.begin("dividing it into operators")
        operators = operators_of(relay.prepare(mod, params), spec, BuildOptions.current())
    if operator is None:
        list_operators(operator_names(operators), as_json)
        return
    explanation = construct_for(operators, operator, spec, BuildOptions.current())
    if as_json:
        _print_json(serialise.to_json(explanation))
        return
    console = output_console()
    for part in render(explanation, spec, alternatives):
        console.print(part)


@app.command()
def devices(
    name: Annotated[str | None, typer.Argument(help="A device, or a row file. Default: list all.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's CPU first, in about 15 s.")
    ] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Forget measurements of this machine's CPU.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the device as a row file.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the known devices, or show one with the source of every number."""
    from tvm_ext.devices import device_db, microbench, probe, row_files
    from tvm_ext.records import serialise

    from . import devices as cli_devices

    if forget:
        row_files.forget()
    if measure:
        name = name or "cpu"
        cli_devices.require_this_machine(name)
        with progress_bar(microbench.MOST_ROUNDS + 1) as steps:
            probe.measure_cpu(steps.begin)
    specs = [device_db.lookup(item) for item in ([name or "cpu"] if name or output else device_db.names())]
    if output is not None:
        row_files.write_row(output, specs[0])
    if as_json:
        texts = list(map(serialise.to_json, specs))
        _print_json(texts[0] if name or output else f"[{','.join(texts)}]")
        return
    for part in cli_devices.describe(specs[0]) if name or output else [cli_devices.overview(specs)]:
        output_console().print(part)


@app.command()
def doctor(
    libraries: Annotated[list[Path] | None, typer.Argument(help="Exported libraries to check as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check the installation: versions, compiler, threads, caches, processor. Exit code 1 if something is broken."""
    from dataclasses import asdict

    from .doctor import HealthCheck, examine

    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    findings: list[HealthCheck] = []
    for finding in examine(libraries or ()):
        findings.append(finding)
        if not as_json:
            output_console().print(
                f"[{colours[finding.state]}]{finding.state:8}[/]", finding.name + ":", finding.detail, highlight=False
            )
            if finding.remedy:
                typer.echo(f"         remedy: {finding.remedy}")
    if as_json:
        _print_json(json.dumps([asdict(finding) for finding in findings]))
    raise typer.Exit(code=int(any(finding.state == "problem" for finding in findings)))


def _build(steps: Steps, model: Any, shape: list[str] | None, target: str, **settings: Any) -> Any:
    """Import and build, in two steps."""
    from tvm_ext import relay

    steps.begin("importing")
    mod, params = relay.frontend.from_onnx(model, shape=parse_shapes(shape or []) or None)
    steps.begin("building")
    return relay.build(mod, target, params=params, progress=steps.detail, **settings)


def _store() -> Any:
    from tvm_ext.autotune.store import MeasurementStore
    from tvm_ext.options import BuildOptions

    return MeasurementStore.for_build(BuildOptions.current())


def _print_json(text: str) -> None:
    typer.echo(text)


def _show_report(report: Any) -> None:
    from tvm_ext.reports.text import show

    show(report, output_console())


def _save_outputs(path: Path, names: Sequence[str], results: Sequence[Any]) -> None:
    import io

    import numpy as np

    from tvm_ext.support.files import write_atomically

    buffer = io.BytesIO()
    np.savez(buffer, **dict(zip(names, results, strict=True)))
    write_atomically(path, buffer.getvalue())


def _show_outputs(names: Sequence[str], results: Sequence[Any], random: Sequence[str], as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"name": name, "shape": list(value.shape), "dtype": str(value.dtype), **_statistics(value)}
        for name, value in zip(names, results, strict=True)
    ]
    if as_json:
        _print_json(json.dumps({"random_inputs": list(random), "outputs": rows}))
        return
    if random:
        typer.echo(f"random input(s): {', '.join(random)}", err=True)
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        typer.echo(f"{row['name']}: {shape} {row['dtype']}, min {row['min']}, mean {row['mean']}, max {row['max']}")


def _statistics(value: Expr) -> dict[str, float | None]:
    """Minimum, mean and maximum; None for an empty tensor or one that has no order."""
    if value.size == 0 or value.dtype.kind not in "fiub":
        return {"min": None, "mean": None, "max": None}
    exact = value.astype("float64")
    return {"min": float(exact.min()), "mean": float(exact.mean()), "max": float(exact.max())}


class _Settings:
    debug = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; always raises SystemExit."""
    settings = _Settings()
    try:
        with interrupts.watched():
            app(args=None if arguments is None else list(arguments), obj=settings, prog_name="tvm-ext")
    except SystemExit as end:
        if end.code == INTERRUPTED and threading.active_count() > 1:
            leave_at_once(INTERRUPTED)
        raise
    except TvmExtError as error:
        if settings.debug:
            raise
        typer.echo(f"error: {error.problem}", err=True)
        if error.remedy:
            typer.echo(f"remedy: {error.remedy}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
