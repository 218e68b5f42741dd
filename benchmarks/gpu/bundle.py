"""Compile the benchmark's kernels here, for a GPU that is elsewhere, into one folder that carries all it needs.

    python benchmarks/gpu/bundle.py build/gpu-bundle --device nvidia-h200
    python benchmarks/gpu/bundle.py build/gpu-bundle --device nvidia-h200 --only gemm_float16_4096 --candidates 10
    python benchmarks/gpu/bundle.py build/gpu-bundle --python 3.12          # the Python of the machine with the GPU
    python benchmarks/gpu/bundle.py build/gpu-bundle --ablation --only roller_matmul   # with ablation.py's variants
    python benchmarks/gpu/bundle.py build/gpu-bundle --pipelining   # ALCOP's operators and networks, all its ablations
    python benchmarks/gpu/bundle.py build/gpu-bundle --templates 16 --only gemm_float16   # CUTLASS's, the best 16 each

There: ``python3 gpu-bundle/run.py --output results.jsonl``. The folder holds TVM's runtime (not its compiler), a
library per kernel with machine code in it, the scripts, ``manifest.json``, and what of this package runs batches of
jobs (``run.py --jobs FOLDER``).
"""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Annotated, Any

import ablation_variants
import typer
from bundle_code import DLIGHT, OURS, PIPELINING_MODES, Settings, export, first_line
from bundle_models import make_model_entry
from bundle_profile import add_profile
from bundle_runtime import copy_job_server, copy_runtime
from bundle_templates import with_templates
from cases import Case
from lists import BOLT_GROUPS, alcop, standard_cases
from manifest import NAME, SIZE_LIMIT_BYTES, STEPS, BundleError, Entry, Manifest, Program, digest, to_json
from model_graphs import choose
from models import MODELS, Model
from pipelining_networks import alcop_models
from programs import function_name, program
from schedules import BUNDLED

from tvm_ext._tvm import IRModule, PassContext, Sequential, Target, tvm
from tvm_ext.bench.environment import current_environment, is_clean
from tvm_ext.devices.capabilities import architecture_suffix
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import CompileError, IllegalRewrite, OptionError, TvmExtError
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, OWN_PATHS
from tvm_ext.support.files import write_atomically
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.tir_passes.construct_kernels import candidates, construct_kernel
from tvm_ext.tir_passes.guard_indices import GuardIndices
from tvm_ext.toolchains.cuda_export import architecture_of
from tvm_ext.toolchains.cuda_toolchain import find_nvcc
from tvm_ext.tuning.kernels import measured_as

HERE = Path(__file__).resolve().parent
WORKLOAD = HERE.parent / "workloads" / "roller_ops.csv"
SCRIPTS = (
    "cases.py", "manifest.py", "references.py", "graph_references.py", "numpy_references.py", "run.py", "gpu.py",
)  # fmt: skip
FIRST_GROUPS = ("gemm_float16", "fused", "chains", *BOLT_GROUPS, "rows", "elementwise", "conv_float16")
"""Of the cases before the models, where time on the GPU runs short."""
APART = "ours_apart"
CHAIN = "chain"
"""The operator of products that become one kernel in "ours", whatever is predicted, and one each in "ours_apart"."""
THREADS = 2
_ONE_PROGRAM = Lock()
"""TVM's operators are written by one thread at a time: the tag of each is a global."""


# --- kernels ------------------------------------------------------------------------------------------------------
def make_entry(case: Case, settings: Settings) -> Entry:
    """All contenders' code for ``case``; a contender that has none says why."""
    programs: list[Program] = []
    refusals: dict[str, str] = {}
    for contender, func in _contenders(case, settings, refusals):
        made = _attempt(case, contender, func, settings)
        if isinstance(made, Program):
            programs.append(made)
        else:
            refusals[contender] = made
    return Entry(case=case, programs=tuple(programs), refusals=refusals)


def _attempt(case: Case, contender: str, func: Any, settings: Settings) -> Program | str:
    """The contender's program, or why it has none."""
    try:
        return _compile(case, contender, func, settings)
    except (CompileError, RuntimeError, ValueError) as error:
        return first_line(error)


def _contenders(case: Case, settings: Settings, refusals: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """(contender, scheduled function): ours, in ``settings.candidates`` forms, stock TVM's, the ablations' variants."""
    with _ONE_PROGRAM:
        func = program(case)
    try:
        yield from _ours(case, func, settings)
        if case.operator == CHAIN:
            yield APART, _kernel(case, func, settings, BuildOptions(enable_persistent_fusion=False))
    except (TvmExtError, IllegalRewrite) as error:
        refusals[OURS] = error.problem
    try:
        with settings.target, PassContext():
            stock = construct_kernel(func, function_name(case), settings.device, BuildOptions(enable_roller=False))
        yield DLIGHT, stock
    except (RuntimeError, ValueError) as error:
        refusals[DLIGHT] = first_line(error)
    if settings.ablation:
        yield from ablation_variants.contenders(case, settings.device, refusals)
    if settings.pipelining:
        for contender in PIPELINING_MODES:
            kernel = _pipelined(contender, case, func, settings, refusals)
            if kernel is not None:
                yield contender, kernel


def _ours(case: Case, func: Any, settings: Settings) -> Iterator[tuple[str, Any]]:
    name = function_name(case)
    if settings.candidates > 1:
        found = candidates(func, settings.device, settings.candidates, name=name)
        for position, (_program, kernel) in enumerate(found):
            yield (f"{OURS}_{position}" if position else OURS), kernel.with_attr("global_symbol", name)
        if found:
            return
    yield OURS, _kernel(case, func, settings, BuildOptions(enable_persistent_fusion=case.operator == CHAIN or "auto"))


def _pipelined(contender: str, case: Case, func: Any, settings: Settings, refusals: dict[str, str]) -> Any:
    try:
        return _kernel(case, func, settings, BuildOptions.create(**PIPELINING_MODES[contender]))
    except (TvmExtError, IllegalRewrite) as error:
        refusals[contender] = error.problem
        return None


def _kernel(case: Case, func: Any, settings: Settings, options: BuildOptions) -> Any:
    """Our kernel; raises IllegalRewrite, with the reason, where there is none."""
    name = function_name(case)
    kernel = construct_kernel(func, name, settings.device, options)
    choice = json.loads(str(kernel.attrs[CHOICE]))
    if choice["path"] not in OWN_PATHS:
        raise IllegalRewrite(choice["reason"])
    return kernel.with_attr("global_symbol", name)


def _compile(case: Case, contender: str, func: Any, settings: Settings) -> Program:
    """A library with the function's host code and its machine code for the GPU, by the passes that builds use."""
    name = function_name(case)
    with settings.target:
        guarded = Sequential([GuardIndices()])(IRModule({name: func}))
        executable = tvm.compile(guarded, target=settings.target)
    file = f"{name}.{contender}.so"
    compiled = export(executable, settings.folder / file, settings.architectures, settings.cache)
    choice = json.loads(str(func.attrs[CHOICE])) if CHOICE in func.attrs else {}
    plan = {"choice": choice, "uses": [asdict(use) for item in compiled for use in item.uses]}
    if contender.startswith(OURS) and choice:
        with _ONE_PROGRAM:
            known = measured_as(program(case), func, name, settings.device)
        if known is not None:
            plan["measured"] = {"workload": asdict(known[0]), "configuration": known[1]}
    return Program(contender=contender, file=file, function=name, plan=plan)


def add_microbench(folder: Path, architectures: Sequence[str]) -> str:
    """Compile the program that measures a GPU's row into ``folder``; raises CompileError."""
    code = [f"-gencode=arch=compute_{architecture_suffix(a)},code={a}" for a in architectures]
    options = ["-O3", "-std=c++17", "--cudart", "static", *code, "-o", str(folder / "microbench")]
    command = [str(find_nvcc().path), *options, str(HERE / "microbench.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise CompileError(f"nvcc refuses microbench.cu: {first_line(RuntimeError(done.stderr))}", "leave it out")
    return "microbench > measured.json; tvm-ext devices --import measured.json: a row as measured"


def files_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in the bundle but its manifest, by name."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != NAME)
    return {path.relative_to(folder).as_posix(): digest(path) for path in paths}


def compile_entries(cases: Sequence[Case], models: Mapping[str, Model], settings: Settings, tell: Any) -> list[Entry]:
    """The entries of all cases and models, in the order in which they are to be run."""

    def told(entry: Entry) -> Entry:
        have = ", ".join(item.contender for item in entry.programs)
        tell(f"{entry.case.id}: {have} {dict(entry.refusals) or ''}")
        return entry

    with ThreadPoolExecutor(THREADS) as pool:
        made = [told(entry) for entry in pool.map(lambda case: make_entry(case, settings), cases)]
    if settings.templates:
        made = with_templates(made, settings.device, settings.templates, settings.folder, settings.cache)
        count = sum(item.kind == STEPS for entry in made for item in entry.programs)
        tell(f"{count} contenders of CUTLASS's templates")
    whole = [told(make_model_entry(name, item, settings)) for name, item in models.items()]
    first = [entry for entry in made if entry.case.group in FIRST_GROUPS]
    return [*first, *whole, *(entry for entry in made if entry.case.group not in FIRST_GROUPS)]


def write_bundle(
    cases: Sequence[Case],
    settings: Settings,
    python: str,
    tell: Any = print,
    models: Mapping[str, Model] = MappingProxyType({}),
) -> Manifest:
    """Compile ``cases`` and ``models`` into the empty folder of ``settings``.

    Raises BundleError where it grows too large.
    """
    entries = compile_entries(cases, models, settings, tell)
    if settings.profile:
        tell(add_profile(cases, settings.device, settings.folder, settings.cache))
    if settings.microbench:
        tell(add_microbench(settings.folder, settings.architectures))
    for name in SCRIPTS:
        shutil.copy2(HERE / name, settings.folder / name)
    copy_runtime(settings.folder, python)
    copy_job_server(settings.folder / "runtime")
    environment = current_environment()
    if not is_clean(environment.commit):
        tell(
            "the sources have uncommitted changes: what this bundle measures will not be taken into benchmarks/results"
        )
    manifest = Manifest(
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=environment.commit or "",
        device=settings.device.name,
        architectures=settings.architectures,
        toolkit=find_nvcc().release,
        versions=dict(environment.versions),
        entries=tuple(entries),
        digests=files_of(settings.folder),
    )
    write_atomically(settings.folder / NAME, to_json(manifest).encode())
    size = sum(path.stat().st_size for path in settings.folder.rglob("*") if path.is_file())
    if size > SIZE_LIMIT_BYTES:
        raise BundleError(
            f"the bundle takes {size / 1e6:.1f} of {SIZE_LIMIT_BYTES / 1e6:.0f} MB: name fewer cases with --only"
        )
    tell(f"{len(entries)} cases, {size / 1e6:.1f} MB in {settings.folder}")
    return manifest


def main(
    folder: Annotated[Path, typer.Argument(help="made anew")],
    device: Annotated[str, typer.Option(help="row of the device tables to construct for")] = "nvidia-h200",
    architecture: Annotated[list[str] | None, typer.Option(help="of the machine code; default: the device's")] = None,
    only: Annotated[list[str] | None, typer.Option(help="ids or groups of cases")] = None,
    candidates: Annotated[int, typer.Option(help="forms of our kernel per case")] = 1,
    python: Annotated[str, typer.Option(help="version on the machine with the GPU")] = "3.12",
    ablation: Annotated[bool, typer.Option(help="the ablations' cases, and their variants as contenders")] = False,
    pipelining: Annotated[
        bool, typer.Option(help="ALCOP's operators and networks, with each part of pipelining")
    ] = False,
    templates: Annotated[int, typer.Option(help="of CUTLASS's for each product, best first; 0: none")] = 1,
    profile: Annotated[bool, typer.Option(help="and programs for profile_templates.py")] = False,
    microbench: Annotated[bool, typer.Option(help="and the program that measures the GPU's row")] = True,
) -> None:
    """Compile the benchmark's kernels into FOLDER."""
    row = lookup(device)
    target = Target(dict(row.target))
    own = architecture_of(str(target))
    if own is None:
        raise OptionError(f"{device} is no CUDA device.", "name one with --device, see `tvm-ext devices`")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    listed = ablation_variants.all_cases() if ablation else standard_cases(WORKLOAD)
    if pipelining:
        listed = list(alcop(WORKLOAD.with_name("alcop_ops.csv")))
    whole = alcop_models() if pipelining else {**MODELS, **BUNDLED}
    chosen, models = choose(listed, {} if ablation else whole, only or [])
    settings = Settings(
        device=row,
        target=target,
        architectures=tuple(architecture or [own]),
        candidates=candidates,
        folder=folder,
        cache=KernelCache.for_build(BuildOptions()),
        ablation=ablation,
        pipelining=pipelining,
        templates=0 if ablation or pipelining else templates,
        profile=profile,
        microbench=microbench,
    )
    write_bundle(chosen, settings, python, models=models)


if __name__ == "__main__":
    typer.run(main)
