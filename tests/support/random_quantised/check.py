"""Builds a case, runs it, and compares every result that is an output with what its layer makes of our own operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from tvm_ext import relay
from tvm_ext._tvm import tensor
from tvm_ext.devices.cpu_info import read_cpu_info
from tvm_ext.devices.device_db import cpu_needs, device_for_target
from tvm_ext.reports.record import OperatorReport
from tvm_ext.runtime.graph_module import flatten_outputs

from ..guarded_memory import build_guarded
from ..random_cases import CaseResult, Figures, WrongResultError, attempted
from ..random_operators.record import Array
from . import dynamic
from .draw import TARGETS, QuantisedCase, draw_case
from .dynamic import DynamicCase
from .writer import FORMS, Codes, Writer, evaluate_plain, write

JITTER = 0.3
"""Of a step, by which float inputs differ from what their codes stand for: no rounding is in doubt."""

DYNAMIC_EVERY = 4
"""The share of cases that are `dynamic`: of four, the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A case by its number alone, for a worker process to draw. ``kind``: its first layer's form, or dynamic."""

    seed: int
    index: int

    @property
    def kind(self) -> str:
        return "dynamic" if self.index % DYNAMIC_EVERY == DYNAMIC_EVERY - 1 else FORMS[self.index % len(FORMS)]

    def drawn(self) -> QuantisedCase | DynamicCase:
        return (dynamic.draw if self.kind == "dynamic" else draw_case)(self.seed, self.index)

    def __str__(self) -> str:
        return str(self.drawn())


def model_of(case: QuantisedCase) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The model under test and its inputs."""
    writer, inputs = Writer(), {}
    numbers = np.random.default_rng([case.seed, case.index])
    for item in case.inputs:
        codes = case.data[item.name]
        if not case.floats:
            inputs[item.name] = codes
            continue
        exact = codes.astype(np.float32) - item.zero.astype(np.float32)
        moved = exact + numbers.uniform(-JITTER, JITTER, exact.shape).astype(np.float32)
        inputs[f"{item.name}_real"] = (moved * item.scale).astype(np.float32)
        writer.add("QuantizeLinear", f"{item.name}_real", *writer.parameters(item), out=item.name)
    for layer, result in case.layers:
        write(writer, layer, result)
    return writer.model(inputs, [result.name for result in outputs_of(case)]), inputs


def outputs_of(case: QuantisedCase) -> list[Codes]:
    results = [result for _, result in case.layers]
    return results if case.exposed else results[-1:]


def usable(name: str) -> Any:
    """The target of `draw.TARGETS`, if this machine's CPU can run code for it; else this machine's CPU."""
    target: Any = {"kind": "llvm", "mcpu": name} if name.startswith("x86") else name
    runs_here = not cpu_needs(device_for_target(target)[1]).unmet_by(read_cpu_info())
    return target if runs_here else "llvm"


def run(case: QuantisedCase) -> tuple[dict[str, Array], tuple[OperatorReport, ...]]:
    """Our results by name. Raises what importing, building and running raise."""
    model, inputs = model_of(case)
    made, operators = _run(model, inputs, usable(case.target), guarded=case.guarded)
    names = [item.name for item in outputs_of(case)]
    return dict(zip(names, made, strict=True)), operators


def _run(
    model: onnx.ModelProto, inputs: Mapping[str, Array], target: Any, *, guarded: bool
) -> tuple[list[Array], tuple[OperatorReport, ...]]:
    mod, params = relay.frontend.from_onnx(model)
    build = build_guarded if guarded else relay.build
    library = build(mod, target, params=params, kernel_cache="off")
    machine = library.vm()
    arguments = [tensor(inputs[item.name]) for item in model.graph.input]
    made = [value.numpy().copy() for value in flatten_outputs(machine["main"](*arguments))]
    again = [value.numpy() for value in flatten_outputs(machine["main"](*arguments))]
    if not all(np.array_equal(a, b) for a, b in zip(made, again, strict=True)):
        raise WrongResultError("the same inputs gave other results the second time")
    return made, library.report.operators


def compare(case: QuantisedCase, made: Mapping[str, Array]) -> tuple[int, int]:
    """(results that are one step off, results). Raises WrongResultError where one is further off."""
    given, allowed = dict(case.data), _allowed(case)
    off = count = 0
    for layer, result in case.layers:
        wanted = evaluate_plain(layer, given, result)
        given[result.name] = made.get(result.name, wanted)
        if result.name not in made:
            continue
        actual = made[result.name]
        if (actual.shape, actual.dtype) != (wanted.shape, wanted.dtype):
            raise WrongResultError(f"{result.name} is {actual.dtype}{actual.shape}, not {wanted.dtype}{wanted.shape}")
        difference = np.abs(actual.astype(int) - wanted.astype(int))
        most = 0 if layer.exact and case.exposed else allowed
        if difference.max(initial=0) > most:
            where = tuple(int(i) for i in np.unravel_index(difference.argmax(), difference.shape))
            raise WrongResultError(
                f"{result.name}: {int((difference > most).sum())} of {difference.size} are off by more than {most}; "
                f"at {where}: {actual[where]} instead of {wanted[where]}"
            )
        off, count = off + int((difference > 0).sum()), count + difference.size
    return off, count


def _allowed(case: QuantisedCase) -> int:
    """Steps that the last result may be off: one, and what a step of each hidden result before makes of it."""
    if case.exposed:
        return 1
    given = dict(case.data)
    for layer, result in case.layers:
        given[result.name] = evaluate_plain(layer, given, result)
    allowed = 1.0
    for position, (layer, result) in enumerate(case.layers[:-1]):
        if layer.exact:
            continue
        for step in (1, -1):
            moved, limits = dict(given), np.iinfo(result.dtype)
            shifted = given[result.name].astype(int) + step
            moved[result.name] = np.clip(shifted, limits.min, limits.max).astype(result.dtype)
            for later, own in case.layers[position + 1 :]:
                moved[own.name] = evaluate_plain(later, moved, own)
            last = case.layers[-1][1].name
            allowed += float(np.abs(moved[last].astype(int) - given[last].astype(int)).max(initial=0))
    return int(allowed)


def check(number: Number) -> Figures:
    """Draw, build, run, compare. Raises WrongResultError, and what drawing, building and running raise."""
    drawn = number.drawn()
    if isinstance(drawn, DynamicCase):
        target = usable(TARGETS[number.index // DYNAMIC_EVERY % len(TARGETS)])
        (made,), operators = _run(
            dynamic.model_of(drawn), {"x": drawn.x}, target, guarded=number.index % (2 * DYNAMIC_EVERY) == 3
        )
        dynamic.compare(drawn, made)
        return Figures(operators=operators)
    results, operators = run(drawn)
    off, count = compare(drawn, results)
    return Figures(operators=operators, off=off, values=count)


def attempt(number: Number) -> CaseResult:
    """`check`, with whatever goes wrong in it turned into a result."""
    return attempted(number, check)
