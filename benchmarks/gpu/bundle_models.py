"""The whole models of a bundle: launched operator by operator by us and by stock TVM, and as schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from bundle_code import DLIGHT, OURS, PIPELINING_MODES, Settings, export, first_line
from manifest import Entry, Program
from model_graphs import CompiledModel, ModelCase, compile_model, flops_of, model_case
from models import Model

from tvm_ext.errors import CompileError
from tvm_ext.options import BuildOptions

SCHEDULED = "ours_scheduled"
CONTENDERS: Mapping[str, BuildOptions] = {
    OURS: BuildOptions(),
    SCHEDULED: BuildOptions(enable_rammer=True),
    DLIGHT: BuildOptions(enable_roller=False),
}


def make_model_entry(name: str, model: Model, settings: Settings) -> Entry:
    """The code of a whole model by all contenders, without its weights, and its graph for the references.

    Schedules are a contender of the models that ask for them: nvcc takes minutes for those of deep networks. Modes of
    pipelining are, where the bundle is of those, with products apart as ALCOP has them.
    """
    device = settings.device.name
    made = model_case(name, model.build(), device, model.below, model.group, model.tolerance)
    programs: list[Program] = []
    refusals: dict[str, str] = {}
    flops = 0.0
    contenders = dict(CONTENDERS)
    if settings.pipelining:
        apart: dict[str, Any] = {"enable_persistent_fusion": False}
        contenders |= {name: BuildOptions.create(**apart, **mode) for name, mode in PIPELINING_MODES.items()}
    for contender, options in contenders.items():
        if contender == SCHEDULED and not model.scheduled:
            continue
        try:
            compiled = compile_model(made.module, device, options)
            programs.append(_program(made, contender, compiled, settings))
        except (CompileError, RuntimeError, ValueError) as error:
            refusals[contender] = first_line(error)
            continue
        flops = flops or flops_of(compiled.operators)
    return Entry(case=replace(made.case, flops=flops), programs=tuple(programs), refusals=refusals)


def _program(made: ModelCase, contender: str, compiled: CompiledModel, settings: Settings) -> Program:
    file = f"{made.case.id}.{contender}.so"
    images = export(compiled.executable, settings.folder / file, settings.architectures, settings.cache)
    kernels = [
        {"name": item.function, "calls": item.calls, "path": item.choice.path, "reason": item.choice.reason}
        for item in compiled.operators
    ]
    uses = [asdict(use) for item in images for use in item.uses]
    plan = {"kernels": kernels, "schedules": list(compiled.schedules), "uses": uses}
    return Program(contender=contender, file=file, function="main", kind="model", plan=plan)
