"""The command ``tvm-ext``: compile, run, bench, explain, advise, quantize, tune, profile, verify, devices and others.

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
from typing import Annotated, Any

import typer

from tvm_ext.errors import TvmExtError

from . import common
from .advise import advise
from .cache import cache
from .compare import compare
from .database import database
from .for_onnx_runtime import write_for_onnx_runtime
from .profile import profile as profile_templates
from .quantize import quantize
from .run import run
from .tune import tune
from .verify import verify

app = typer.Typer(
    name="tvm-ext",
    help="Compile ONNX models on stock TVM, with kernels that are constructed instead of searched.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

_SHOWN_KERNELS = 10  # a choice: what a build prints; reports have all

app.command()(advise)
app.command()(cache)
app.command()(compare)
app.command("profile")(profile_templates)
app.command()(quantize)
app.command()(run)
app.command()(tune)
app.command()(verify)
app.add_typer(database, name="database")


@app.callback()
def _settings(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the Python traceback of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=common.say_version, help="Show the versions, and end.")
    ] = False,
) -> None:
    context.obj.debug = debug


@app.command()
def compile(
    model: common.Model,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The library to write. Default: MODEL.so. Of an IPU a folder.")
    ] = None,
    target: common.Target = "llvm",
    shape: common.ShapeOption = None,
    open_sizes: common.Open = None,
    batch: common.Batch = 1,
    roller: common.Roller = True,
    persistent: common.Persistent = None,
    cutlass: common.Cutlass = None,
    rammer: common.Rammer = None,
    layout: common.Layout = None,
    threads: common.ThreadCount = None,
    pipelining: common.Pipelining = None,
    candidates: common.CandidateCount = None,
    precision: common.Products = None,
    precision_bound: common.Bound = None,
    report: common.Reports = None,
    trace: Annotated[
        Path | None, typer.Option(help="Also write a measured run, and --rammer's schedules, for Perfetto.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Measure each operator for the report.")] = False,
    keep_times: Annotated[
        bool, typer.Option("--keep-times", help="Measure rTasks and keep their times for later builds.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Interpret GPU kernels; a wrong one is an error.")] = False,
    onnxruntime: Annotated[
        Path | None, typer.Option(help="Write a model for ONNX Runtime instead, with the compiled parts beside it.")
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Compile a model to a shared library."""
    from tvm_ext import relay
    from tvm_ext.reports.text import show

    from .ipu import ipu_called, write_for_ipu

    if (device := ipu_called(target)) is not None:
        other = {"--open": open_sizes, "--onnxruntime": onnxruntime, "--profile": profile, "--keep-times": keep_times}
        common.check_alone(f"--target {target}", {**other, "--verify": verify, "--trace": trace, "--report": report})
        chosen = common.build_settings(layout, threads, pipelining, candidates, precision, precision_bound)
        write_for_ipu(model, output or Path(f"{Path(model).stem}.ipu"), device, shape, batch, chosen, as_json)
        return
    named, output = output, output or Path(f"{Path(model).stem}.so")
    with common.progress_bar(4) as steps:
        switches = {
            "enable_roller": roller,
            "enable_persistent_fusion": persistent,
            "enable_cutlass": cutlass,
            "enable_rammer": rammer,
        }
        chosen = common.build_settings(layout, threads, pipelining, candidates, precision, precision_bound)
        settings: dict[str, Any] = {key: value for key, value in switches.items() if value is not None} | chosen
        measuring = {"--profile": profile, "--keep-times": keep_times, "--verify": verify, "--trace": trace}
        if onnxruntime is not None:
            writing = {"--output": named, "--open": open_sizes, "--report": report, "--json": as_json}
            common.check_alone("--onnxruntime", {**writing, **measuring})
            steps.begin("building")
            typer.echo(write_for_onnx_runtime(model, onnxruntime, target, shape, batch, settings))
            return
        if open_sizes:
            common.check_alone("--open", measuring)
            steps.begin("building variants")
            several = relay.build_open(
                common.load_model(model, batch),
                common.parse_open(open_sizes),
                target,
                shape=common.parse_shapes(shape) or None,
                progress=steps.detail,
                **settings,
            )
            several.export_library(output)
            for path in report or []:
                several.report.save(path)
            typer.echo(several.report.to_json() if as_json else f"{several.report}\nwrote {output}")
            return
        library = common.build_model(steps, model, shape, target, batch, verify=verify, **switches, **chosen)
        if profile or keep_times or (trace is not None and not rammer):
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
        typer.echo(library.report.to_json())
    else:
        show(library.report, common.output_console(), _SHOWN_KERNELS)
        typer.echo(f"wrote {', '.join(map(str, [output, *(report or []), *([trace] if trace else [])]))}")


@app.command()
def bench(
    model: common.Model,
    target: common.Target = "llvm",
    shape: common.ShapeOption = None,
    batch: common.Batch = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each contender, taken in turns.")] = 8,
    peer: Annotated[
        list[str] | None, typer.Option(help="onnxruntime, openvino_f32, stock_tvm. Default: all that are installed.")
    ] = None,
    layout: common.Layout = None,
    threads: common.ThreadCount = None,
    pipelining: common.Pipelining = None,
    candidates: common.CandidateCount = None,
    precision: common.Products = None,
    precision_bound: common.Bound = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also measure peaks of memory, of loading and of runs; a process each.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the JSON to this file.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the report of our build (.html or .json), with memory if measured.")
    ] = None,
    seed: common.Seed = 0,
    as_json: common.AsJson = False,
) -> None:
    """Time a model beside ONNX Runtime, OpenVINO and stock TVM; contenders take turns."""
    from tvm_ext.bench.compare import bench as measure
    from tvm_ext.options import BuildOptions
    from tvm_ext.records import serialise
    from tvm_ext.support.files import write_atomically

    common.check_model(model)
    with common.progress_bar(5 + memory) as steps:
        result = measure(
            model,
            batch=batch,
            shape=common.parse_shapes(shape) or None,
            target=target,
            options=BuildOptions.current(
                **common.build_settings(layout, threads, pipelining, candidates, precision, precision_bound)
            ),
            peers=peer,
            rounds=rounds,
            seed=seed,
            memory=memory,
            report=report,
            progress=steps.begin,
        )
    text = serialise.to_json(result)
    if output is not None:
        write_atomically(output, (text + "\n").encode())
    if as_json:
        typer.echo(text)
        return
    console = common.output_console()
    console.print(result.table())
    for name, reason in result.skipped:
        console.print(f"{name} took no part: {reason}", markup=False)


@app.command()
def explain(
    model: common.Model,
    operator: Annotated[str | None, typer.Option(help="The operator's name. Default: list all names.")] = None,
    device: Annotated[str, typer.Option(help="Device to construct for (see `tvm-ext devices`).")] = "cpu",
    shape: common.ShapeOption = None,
    batch: common.Batch = 1,
    layout: common.Layout = None,
    threads: common.ThreadCount = None,
    pipelining: common.Pipelining = None,
    candidates: common.CandidateCount = None,
    precision: common.Products = None,
    precision_bound: common.Bound = None,
    alternatives: Annotated[int, typer.Option(min=0, help="How many slower programs to show.")] = 10,
    as_json: common.AsJson = False,
) -> None:
    """Show how one operator's tiles are constructed, their predicted time, and why the alternatives are slower."""
    from tvm_ext import relay
    from tvm_ext.devices.device_db import lookup
    from tvm_ext.options import BuildOptions
    from tvm_ext.records import serialise

    from .explain import explain as construct_for
    from .explain import operator_names, operators_of, render

    spec = lookup(device)
    options = BuildOptions.current(
        **common.build_settings(layout, threads, pipelining, candidates, precision, precision_bound)
    )
    with common.progress_bar(2) as steps:
        steps.begin("importing")
        mod, params = common.import_model(model, shape, batch)
        steps.begin("dividing it into operators")
        operators = operators_of(relay.prepare(mod, params), spec, options)
    if operator is None:
        common.list_operators(operator_names(operators), as_json)
        return
    explanation = construct_for(operators, operator, spec, options)
    if as_json:
        typer.echo(serialise.to_json(explanation))
        return
    console = common.output_console()
    for part in render(explanation, spec, alternatives):
        console.print(part)


@app.command()
def devices(
    name: Annotated[str | None, typer.Argument(help="A device, or a row file. Default: list all.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's CPU first, in about 15 s.")
    ] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Forget measurements of this machine's CPU.")] = False,
    measured: Annotated[
        Path | None, typer.Option("--import", metavar="FILE", help="What a bundle's microbench printed on a GPU.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the device as a row file.")] = None,
    as_json: common.AsJson = False,
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
        with common.progress_bar(microbench.MOST_ROUNDS + 1) as steps:
            probe.measure_cpu(steps.begin, cli_devices.with_functions)
    if measured is not None:
        specs = [cli_devices.imported(measured, name)]
        name = specs[0].name
    else:
        specs = [device_db.lookup(item) for item in ([name or "cpu"] if name or output else device_db.names())]
    if output is not None:
        row_files.write_row(output, specs[0])
    if as_json:
        texts = list(map(serialise.to_json, specs))
        typer.echo(texts[0] if name or output else f"[{','.join(texts)}]")
        return
    for part in cli_devices.describe(specs[0]) if name or output else [cli_devices.overview(specs)]:
        common.output_console().print(part)


@app.command()
def doctor(
    libraries: Annotated[list[Path] | None, typer.Argument(help="Exported libraries to check as well.")] = None,
    as_json: common.AsJson = False,
) -> None:
    """Check the installation: versions, compiler, threads, caches, processor. Exit code 1 if something is broken."""
    from dataclasses import asdict

    from .doctor import HealthCheck, examine

    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    findings: list[HealthCheck] = []
    for finding in examine(libraries or ()):
        findings.append(finding)
        if not as_json:
            common.output_console().print(
                f"[{colours[finding.state]}]{finding.state:8}[/]", finding.name + ":", finding.detail, highlight=False
            )
            if finding.remedy:
                typer.echo(f"         remedy: {finding.remedy}")
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    raise typer.Exit(code=int(any(finding.state == "problem" for finding in findings)))


def _store() -> Any:
    from tvm_ext.autotune.store import MeasurementStore
    from tvm_ext.options import BuildOptions

    return MeasurementStore.for_build(BuildOptions.current())


class _Settings:
    debug = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; raises SystemExit, or ends the process where it is the process's own command.

    Else TVM's threads would be waited for, which yield 300,000 times first: minutes on a busy machine.
    """
    settings = _Settings()
    try:
        with common.interrupts.watched():
            app(args=None if arguments is None else list(arguments), obj=settings, prog_name="tvm-ext")
    except SystemExit as end:
        if arguments is None or (end.code == common.INTERRUPTED and threading.active_count() > 1):
            common.leave_at_once(int(end.code or 0))
        raise
    except TvmExtError as error:
        if settings.debug:
            raise
        typer.echo(f"error: {error.problem}", err=True)
        if error.remedy:
            typer.echo(f"remedy: {error.remedy}", err=True)
        if arguments is None:
            common.leave_at_once(2)
        sys.exit(2)


if __name__ == "__main__":
    main()
