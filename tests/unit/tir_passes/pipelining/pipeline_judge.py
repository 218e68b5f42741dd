"""Judges mutants of pipelined kernels twice: by the SIMT interpreter, and by running one thread after another.

What is harmful is the slow execution's say, which shares nothing with the interpreter (`scalar_threads`): asynchronous
copies land as late as the waits allow, and all accesses between two barriers are compared pairwise, in two orders of
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.pipelining.check import Pipelined, largest_error, tolerance
from tests.support.simt.mutate import Mutant
from tests.unit.verify.simt import scalar_translate
from tests.unit.verify.simt.scalar_threads import Kernel, execute
from tvm_ext.verify import simt


class PipelineTranslator(scalar_translate.Translator):
    """Knows the instructions of asynchronous copies as calls, with a predicate, and views of shared memory."""

    def _stmt_DeclBuffer(self, s: Any) -> None:
        """Another view of shared memory: stock TVM lays buffers over one another that are not in use together."""
        pointer = s.data if type(s.data).__name__ == "Var" else s.data.args[0]
        known = next((entry for entry in self.buffers if entry[0].same_as(pointer)), None)
        if known is None:
            super()._stmt_DeclBuffer(s)
        else:
            self.buffers.append((s.buffer, known[1], known[2]))

    def _do_ptx_cp_async_commit_group(self, *_words: Any) -> None:
        self.emit("groups += 1")

    def _do_ptx_cp_async_wait_group(self, count: Any, *_words: Any) -> None:
        self.emit(f"memory.land(thread, groups - {int(count)})")

    def _do_s_tir_cp_async_raw(self, *args: Any) -> None:
        target, at, source, origin, size_bytes, *predicate = args
        if not predicate:
            super()._do_s_tir_cp_async_raw(*args)
            return
        name, first, itemsize = self.place(target)
        count = int(size_bytes) // itemsize
        self.emit(f"if {self.expr(predicate[0])}:")
        self.depth += 1
        super()._do_s_tir_cp_async_raw(target, at, source, origin, size_bytes)
        self.depth -= 1
        self.emit("else:")
        self.depth += 1
        self.emit(f"for lane in range({count}): memory.write(thread, {name!r}, {first} + {self.expr(at)} + lane, 0.0)")
        self.depth -= 1


def translate(function: Any) -> Kernel:
    """As `scalar_translate.translate`, with `PipelineTranslator`."""
    original = scalar_translate.Translator
    scalar_translate.Translator = PipelineTranslator  # type: ignore[misc]
    try:
        return scalar_translate.translate(function)
    finally:
        scalar_translate.Translator = original  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A mutant, what the slow execution says of it, and what the interpreter does."""

    item: Pipelined
    mutant: Mutant
    harm: frozenset[str]
    findings: tuple[str, ...]
    wrong_values: bool

    @property
    def caught(self) -> bool:
        return bool(self.findings) or self.wrong_values

    def __str__(self) -> str:
        what = f"{self.item.kernel} on {self.item.device}: {self.mutant.kind}: {self.mutant.change}"
        return f"{what}: {sorted(self.harm)} {sorted(set(self.findings))}"


class Judge:
    """For one pipelined kernel: its inputs and reference are made once."""

    def __init__(self, item: Pipelined, seed: int = 1) -> None:
        self.item = item
        *names, self._output = item.names
        inputs = item.kernel.inputs(item.function, seed)
        self._inputs = dict(zip(names, inputs, strict=True))
        self._expected = item.kernel.reference(*inputs)

    def lower(self, function: Any) -> tuple[simt.DeviceKernel, ...]:
        return simt.lower(function, self.item.device)

    def harm(self, kernels: Sequence[simt.DeviceKernel]) -> frozenset[str]:
        """What is wrong by the slow execution: "race", "early", "bounds", ..., "values"; nothing for a good kernel."""
        arrays = {tensor.name: np.full(tensor.shape, np.nan) for tensor in kernels[0].tensors} | self._inputs
        translated = [translate(kernel.function) for kernel in kernels]
        for reverse in (False, True):
            verdict = execute(translated, {f"{name}_ptr": array for name, array in arrays.items()}, reverse=reverse)
            right = self._is_right(verdict.outputs[f"{self._output}_ptr"])
            if verdict.problems or not right:
                return frozenset(verdict.problems | (set() if right else {"values"}))
        return frozenset()

    def interpret(self, kernels: Sequence[simt.DeviceKernel]) -> tuple[tuple[str, ...], bool]:
        """(kinds of findings, whether values are wrong) by the interpreter."""
        run = simt.run(kernels, self._inputs, device=self.item.device)
        wrong = self._output not in run.outputs or not self._is_right(run.outputs[self._output])
        return tuple(finding.kind for finding in run.findings), wrong

    def _is_right(self, output: np.ndarray) -> bool:
        return largest_error(output, self._expected) <= tolerance(self.item)

    def judge(self, mutants: Iterator[Mutant], make: Callable[[Any], Any] = lambda function: function) -> list[Judged]:
        """All ``mutants``; ``make`` makes a kernel of what was mutated (lowers primitives)."""
        judged = []
        for mutant in mutants:
            kernels = self.lower(make(mutant.function))
            findings, wrong = self.interpret(kernels)
            judged.append(
                Judged(item=self.item, mutant=mutant, harm=self.harm(kernels), findings=findings, wrong_values=wrong)
            )
        return judged
