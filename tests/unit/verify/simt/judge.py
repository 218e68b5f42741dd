"""Judges kernels and their mutants twice: by the SIMT interpreter, and by a slow execution of one thread after another.

What is harmful is the slow execution's say (`scalar_threads`), which compares all accesses pairwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from tests.support.simt.good_kernels import GoodKernel
from tests.support.simt.mutate import KINDS, Mutant, mutants
from tests.unit.verify.simt.scalar_threads import execute
from tests.unit.verify.simt.scalar_translate import translate
from tvm_ext.verify import simt

DEVICE = "nvidia-a100"
SYNCHRONISATION = ("remove_barrier", "diverge_barrier", "change_wait", "drop_commit")
Kernels = tuple[simt.DeviceKernel, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A mutant of ``kernel``, what the slow execution says of it, and what the interpreter does."""

    kernel: str
    mutant: Mutant
    harm: frozenset[str]
    findings: tuple[str, ...]
    wrong_values: bool

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.mutant.kind}: {self.mutant.change}: {sorted(self.harm)} {sorted(set(self.findings))}"
        )


@cache
def lowered(kernel: GoodKernel) -> Kernels:
    return simt.lower(kernel.function, DEVICE, config={"tirx.use_async_copy": kernel.async_copy})


def _arguments(kernel: GoodKernel) -> tuple[dict[str, np.ndarray], str]:
    """(inputs by name, name of the output)."""
    *names, output = (str(param.name) for param in kernel.function.params)
    return dict(zip(names, kernel.inputs(), strict=True)), output


def _close(got: np.ndarray, expected: np.ndarray) -> bool:
    return np.allclose(got.astype(np.float64).reshape(expected.shape), expected, rtol=1e-3, atol=1e-4)


def harm_of(kernel: GoodKernel, kernels: Kernels, expected: np.ndarray) -> frozenset[str]:
    """What is wrong, by the slow execution in two orders of threads: races, bounds, ... and "values"."""
    inputs, output = _arguments(kernel)
    arrays = {tensor.name: np.full(tensor.shape, np.nan) for tensor in kernels[0].tensors} | inputs
    translated = [translate(part.function) for part in kernels]
    for reverse in (False, True):
        verdict = execute(translated, {f"{name}_ptr": array for name, array in arrays.items()}, reverse=reverse)
        right = _close(verdict.outputs[f"{output}_ptr"], expected)
        if verdict.problems or not right:
            return frozenset(verdict.problems | (set() if right else {"values"}))
    return frozenset()


def interpreted(kernel: GoodKernel, kernels: Kernels, expected: np.ndarray) -> tuple[tuple[str, ...], bool]:
    """(kinds of findings, whether values are wrong) by the interpreter."""
    inputs, output = _arguments(kernel)
    run = simt.run(kernels, inputs, device=DEVICE)
    wrong = output not in run.outputs or not _close(run.outputs[output], expected)
    return tuple(finding.kind for finding in run.findings), wrong


def judge(kernel: GoodKernel, *, every: int = 1, kinds: Sequence[str] = KINDS) -> Iterable[Judged]:
    kernels, expected = lowered(kernel), kernel.reference(*kernel.inputs())
    for position, part in enumerate(kernels):
        for number, mutant in enumerate(mutants(part.function)):
            if mutant.kind not in kinds or (mutant.kind not in SYNCHRONISATION and number % every):
                continue
            changed = (*kernels[:position], replace(part, function=mutant.function), *kernels[position + 1 :])
            findings, wrong = interpreted(kernel, changed, expected)
            harm = harm_of(kernel, changed, expected)
            yield Judged(kernel=kernel.name, mutant=mutant, harm=harm, findings=findings, wrong_values=wrong)


def show(judged: Sequence[Judged]) -> str:
    """Counts by kind of mutant, as a table."""
    rows = [f"{'mutants':20} {'all':>5} {'harmful':>8} {'found':>6} {'by values':>10} {'missed':>7} {'accused':>8}"]
    counts = {kind: Counter[str]() for kind in (*KINDS, "total")}
    for one in judged:
        harmful, found = bool(one.harm), bool(one.findings)
        for count in (counts[one.mutant.kind], counts["total"]):
            count["all"] += 1
            count["harmful"] += harmful
            count["found"] += harmful and found
            count["by values"] += harmful and not found and one.wrong_values
            count["missed"] += harmful and not found and not one.wrong_values
            count["accused"] += not harmful and (found or one.wrong_values)
    for kind, c in counts.items():
        columns = (("all", 5), ("harmful", 8), ("found", 6), ("by values", 10), ("missed", 7), ("accused", 8))
        rows.append(" ".join([f"{kind:20}", *(f"{c[name]:{width}}" for name, width in columns)]))
    return "\n".join(rows)


def check(judged: Sequence[Judged]) -> None:
    print("\n" + show(judged))
    missed = [str(one) for one in judged if one.harm and not one.findings and not one.wrong_values]
    assert not missed, "harmful mutants that nothing shows:\n" + "\n".join(missed)
    # Values in lockstep come out right where a race would spoil them: what is not only a wrong value must be found.
    silent = [str(one) for one in judged if one.harm - {"values"} and not one.findings]
    assert not silent, "harmful mutants without a finding:\n" + "\n".join(silent)
