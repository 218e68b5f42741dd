"""Run a bundle on the machine with the GPU: check every output, then time it beside PyTorch and stock TVM.

    python3 gpu-bundle/run.py --output results.jsonl --minutes 8
    python3 gpu-bundle/run.py --jobs FOLDER            # batches of a search, into FOLDER: NumPy and a driver alone

Needs NumPy, PyTorch (or --backend runtime: TVM's runtime alone, which the bundle has) and a driver. Every case is a
line of JSON in the output; a run that is started again goes on where the last one ended. What computes a wrong result
is not timed. Exits with 1 where a result of ours is wrong, with 2 where the bundle cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import graph_references
from cases import Case
from gpu import Gpu, RuntimeGpu, TorchGpu, driver_version, load_runtime, summary
from manifest import STEPS, BundleError, Entry, Manifest, Program, check_device, read_bundle

HERE = Path(__file__).resolve().parent
COMPILED_GROUPS = (
    "fused",
    "chains",
    "rows",
    "elementwise",
    "models",
    "schedules",
)  # torch.compile takes seconds, and helps where ops fuse

JOBS_IDLE_S = 1.0
"""After the last batch, before `serve_jobs` ends."""

_CPU, _CUDA = 1, 2  # DLPack's numbers of devices

Call = Callable[[Sequence[Any]], Any]
Record = dict[str, Any]


def run_entry(entry: Entry, gpu: Gpu, functions: dict[str, Call], compiled: bool) -> Record:
    """All contenders of ``entry``: their state (ok, wrong, failed, refused), error and times."""
    case = entry.case
    record: Record = {name: {"state": "refused", "why": why} for name, why in entry.refusals.items()}
    inputs = gpu.inputs(case)
    try:
        expected = gpu.expected(case, inputs)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return {**record, **{item.contender: _failed(error, "no reference") for item in entry.programs}}
    bind = _answering if case.operator == graph_references.OPERATOR else _into
    for name, call in functions.items():
        record[name] = _guarded(lambda call=call: _contender(case, gpu, bind(gpu, case, call), inputs, expected))
    for name, call in gpu.peers(case, compiled).items():
        record[name] = _guarded(lambda call=call: _contender(case, gpu, call, inputs, expected))
    return record


def _into(gpu: Gpu, case: Case, function: Call) -> Call:
    """``function``, which writes into its last argument, as one that returns. The output is poisoned once."""
    output = gpu.poisoned(case.output)

    def call(inputs: Sequence[Any]) -> Any:
        function([*inputs, output])
        return output

    return call


def _answering(gpu: Gpu, _case: Case, function: Call) -> Call:
    """``function`` of the VM. What it answers first is poisoned and given back: the pool then hands it out again."""
    poisoned: list[bool] = []

    def call(inputs: Sequence[Any]) -> Any:
        if not poisoned:
            for output in gpu.adopt(function(inputs)):
                gpu.poison(output)
            poisoned.append(True)
        return gpu.adopt(function(inputs))

    return call


def _error(gpu: Gpu, actual: Any, expected: Any) -> float:
    """The largest of all outputs' errors."""
    if not isinstance(expected, tuple):
        return gpu.error(actual, expected)
    return max(gpu.error(one, other) for one, other in zip(actual, expected, strict=True))


def _contender(case: Case, gpu: Gpu, call: Call, inputs: Sequence[Any], expected: Any) -> Record:
    error = _error(gpu, call(inputs), expected)
    allowed = max(case.allowed_error, 1e-12)
    if error > allowed:
        return {"state": "wrong", "error": error if math.isfinite(error) else "not finite", "allowed": allowed}
    return {"state": "ok", "error": error, "allowed": allowed, **summary(gpu.time(lambda: call(inputs)))}


def _guarded(action: Callable[[], Record]) -> Record:
    """What a contender fails with is its result: the others still run."""
    try:
        return action()
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        return _failed(error, type(error).__name__)


def _failed(error: Exception, what: str) -> Record:
    return {"state": "failed", "why": f"{what}: {str(error).strip()[-400:]}"}


# --- the bundle ---------------------------------------------------------------------------------------------------
def load_functions(entry: Entry, folder: Path, gpu: Gpu) -> dict[str, Call]:
    """The entry's functions, from their libraries."""
    found = {}
    for item in entry.programs:
        if item.kind == STEPS:
            steps = {step.function: _load(item, folder, step.function) for step in item.steps}
            found[item.contender] = stepwise(item, entry.case, gpu, steps)
        else:
            found[item.contender] = _load(item, folder, item.function)
    return found


def _load(program: Program, folder: Path, name: str) -> Call:
    import tvm_ffi

    function: list[Any] = []  # loaded at the first call, so that a library that does not load is one failed contender

    def call(arguments: Sequence[Any]) -> Any:
        if not function:
            module = tvm_ffi.load_module(str(folder / program.file))
            function.append((_start_vm(module) if program.kind == "model" else module)[name])
        return function[0](*arguments)

    return call


def stepwise(program: Program, case: Case, gpu: Gpu, functions: Mapping[str, Call]) -> Call:
    """The steps of ``program`` as one call. Other forms of inputs, and what lies between, are made at the first one."""
    tensors: dict[str, Any] = {}

    def call(arguments: Sequence[Any]) -> Any:
        if not tensors:
            names = [*(item.name for item in case.inputs), case.output.name]
            tensors.update(zip(names, arguments, strict=True))
            for name, form in program.arranged.items():
                tensors[name] = gpu.arranged(tensors[name], form)
            tensors.update({item.name: gpu.poisoned(item) for item in program.between})
        for step in program.steps:
            functions[step.function]([tensors[name] for name in step.arguments])

    return call


def _start_vm(module: Any) -> Any:
    """The Relax VM over a library, on the first GPU, as tvm.runtime.vm starts it."""
    machine = module["vm_load_executable"]()
    pooled = 2
    machine["vm_initialization"](_CUDA, 0, pooled, _CPU, 0, pooled)
    return machine


def open_gpu(folder: Path, backend: str) -> Gpu:
    """The GPU through PyTorch or TVM's runtime; raises BundleError where that is not possible."""
    sys.path.insert(0, str(folder / "runtime"))
    if backend == "torch":
        try:
            import torch
        except ImportError as error:
            raise BundleError(f"PyTorch is not installed ({error}): install it, or use --backend runtime") from error
        if not torch.cuda.is_available():
            raise BundleError("PyTorch sees no GPU: check `nvidia-smi`, and that PyTorch was built for CUDA")
        load_runtime(folder / "runtime" / "tvm")
        return TorchGpu(torch)
    import tvm

    load_runtime(folder / "runtime" / "tvm")
    return RuntimeGpu(tvm)


def finished(output: Path, identity: str) -> set[str]:
    """Ids of the cases that ``output`` has for this bundle; a line that was cut off by a kill does not count."""
    if not output.exists():
        return set()
    lines = []
    for line in output.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:  # noqa: PERF203 - the last line, at most
            continue
    return {item["id"] for item in lines if item.get("bundle") == identity and "id" in item}


def run_bundle(
    manifest: Manifest, folder: Path, gpu: Gpu, output: Path, minutes: float, *, compiled: bool = True
) -> list[Record]:
    """Run what ``output`` has not yet, until ``minutes`` are over; appends a line per case, answers the new ones.

    ``compiled``: beside `torch.compile` where operators fuse.

    Raises RuntimeError where a kernel broke the process' use of the device: the rest needs another process.
    """
    done = finished(output, manifest.identity)
    end = time.monotonic() + 60 * minutes
    records = []
    for entry in manifest.entries:
        if entry.case.id in done:
            continue
        if time.monotonic() > end:
            print(f"{minutes:g} minutes are over; start again to go on", flush=True)
            break
        by_torch = compiled and entry.case.group in COMPILED_GROUPS
        contenders = run_entry(entry, gpu, load_functions(entry, folder, gpu), by_torch)
        record = _record(manifest, gpu, entry, contenders)
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        records.append(record)
        print(line(record), flush=True)
        gpu.check()
    return records


def _record(manifest: Manifest, gpu: Gpu, entry: Entry, contenders: Record) -> Record:
    case = entry.case
    measured = {item.contender: item.plan["measured"] for item in entry.programs if "measured" in item.plan}
    return {
        "bundle": manifest.identity, "commit": manifest.commit, "device": gpu.name, "constructed_for": manifest.device,
        "id": case.id, "group": case.group, "flops": case.flops, "bytes": case.bytes, "contenders": contenders,
        "measured": measured,
    }  # fmt: skip


def line(record: Record) -> str:
    """One case as text: times in microseconds, and what did not work."""
    parts = []
    for name, item in record["contenders"].items():
        time_us = item.get("median_us")
        parts.append(f"{name} {time_us:.1f}" if time_us else f"{name} {item['state'].upper()}")
    ours = record["contenders"].get("ours", {}).get("median_us")
    rate = f" [{record['flops'] / ours / 1e6:.2f} TFLOP/s, {record['bytes'] / ours / 1e3:.0f} GB/s]" if ours else ""
    return f"{record['id']:<28} " + "  ".join(parts) + rate


# --- jobs ---------------------------------------------------------------------------------------------------------
def serve_jobs(bundle: Path, folder: Path) -> tuple[int, tuple[str, ...]]:
    """Run the batches in ``folder`` that have no results yet, by the package's own server.

    Answers how many ran, and of each damaged one which it is and why. A process of its own has the device, so that a
    kernel that crashes or hangs costs itself alone. Times are the device's events. Raises BundleError where nothing can
    be run here.
    """
    runtime = bundle / "runtime"
    sys.path.insert(0, str(runtime))
    os.environ["TVM_USE_RUNTIME_LIB"] = "1"
    from tvm_ext.autotune.job_folder import serve_folder
    from tvm_ext.errors import TvmExtError

    if not folder.is_dir():
        raise BundleError(f"there is no folder {folder}: name one that has the folders batch-1, batch-2, ...")
    libraries = [str(runtime / "tvm" / "lib" / name) for name in ("libtvm_runtime.so", "libtvm_runtime_cuda.so")]
    try:
        served = serve_folder(folder, "cuda", idle_s=JOBS_IDLE_S, libraries=libraries)
    except TvmExtError as error:
        raise BundleError(str(error)) from error
    return served.ran, served.refused


def _is_wrong(record: Record) -> bool:
    ours = (item for name, item in record["contenders"].items() if name.startswith("ours"))
    return any(item["state"] == "wrong" for item in ours)


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the exit status."""
    parser = argparse.ArgumentParser(description="Run a bundle of GPU kernels.")
    parser.add_argument("--bundle", type=Path, default=HERE, help="the bundle's folder (default: where this script is)")
    parser.add_argument("--output", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--backend", choices=("torch", "runtime"), default="torch")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes seconds a case")
    parser.add_argument("--jobs", type=Path, help="run the batches in this folder instead of the bundle's cases")
    settings = parser.parse_args(arguments)
    try:
        manifest = read_bundle(settings.bundle)
        driver = driver_version()
        if settings.jobs is not None:
            ran, refused = serve_jobs(settings.bundle, settings.jobs)
            print(f"{ran} batches run", flush=True)
            if refused:
                raise BundleError("\nerror: ".join(refused))
            return 0
        gpu = open_gpu(settings.bundle, settings.backend)
        check_device(manifest, gpu.capability, driver)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{gpu.name}, CUDA driver {driver}; {len(manifest.entries)} cases for {manifest.device}", flush=True)
    started = time.monotonic()
    try:
        records = run_bundle(
            manifest, settings.bundle, gpu, settings.output, settings.minutes, compiled=not settings.no_compile
        )
    except RuntimeError as error:
        minutes = settings.minutes - (time.monotonic() - started) / 60
        print(f"the device failed ({str(error).splitlines()[0]}); going on in a new process", flush=True)
        again = ["--bundle", settings.bundle, "--output", settings.output, "--backend", settings.backend]
        again += ["--no-compile"] if settings.no_compile else []
        os.execv(sys.executable, [sys.executable, __file__, *map(str, again), "--minutes", str(max(minutes, 0))])
    wrong = [item["id"] for item in records if _is_wrong(item)]
    print(f"{len(records)} cases run, {len(wrong)} with a wrong result of ours {wrong or ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
