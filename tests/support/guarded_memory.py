"""Kernel calls in guarded memory: who writes where he should not? `build_guarded` guards workspaces of kernels, too.

Each tensor of a call is copied into memory of its own that lies between guard words; what the kernel has to write
starts as a pattern (NaN, or a conspicuous integer). After the call the guards must be whole, the inputs what they were,
and no element of an output may still be the pattern.

Worked example: 5 float32 elements lie at byte 4096 of 4096 + 20 + 4096; a store to element 5 changes the word at byte
4116, the first one behind them, and is an error that names the kernel, the tensor and the distance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import tvm
import tvm_ffi

from tvm_ext import pass_pipeline, relay
from tvm_ext._tvm import relax
from tvm_ext.errors import TargetError, TvmExtError

from .guard_workspaces import GUARD_ERROR, GuardWorkspaces

if TYPE_CHECKING:
    from tvm_ext._tvm import Tensor

GUARD_BYTES = 4096
"""On each side. A multiple of every alignment that kernels are promised."""

NO_OP, SKIP_RUN = 0, 1
"""What an instrument of the VM answers: TVM's VMInstrumentReturnKind."""

_WORKSPACE_ERROR = "its workspace"  # see guard_workspaces.py

_ALIGNMENT = 64  # of what the VM allocates; a tensor's own place relative to it is kept

Words = npt.NDArray[Any]


class MemoryGuardError(TvmExtError, AssertionError):
    """A kernel, run in guarded memory, wrote outside a tensor or to an input, or left an element unwritten."""


assert MemoryGuardError.__name__ == GUARD_ERROR
tvm_ffi.register_error(MemoryGuardError)


@dataclass(frozen=True, slots=True)
class Patterns:
    """What fills one element, as an unsigned integer: the guards' pattern, and two that outputs start with."""

    guard: int
    first: int
    second: int


_QUIET_NAN = {"float16": "7e", "bfloat16": "7f", "float32": "7fff", "float64": "7fff"}
"""The leading bytes of a NaN, whose payload tells it from those that arithmetic makes (7fc00000)."""


def patterns_of(dtype: str) -> Patterns:
    """NaNs of three payloads for floats, else conspicuous integers; an output of bool can only start as True or False.

    float32: 7fffc3c3, 7fffa5a5, 7fff9a9a; int32: c3c3c3c3, a5a5a5a5, 9a9a9a9a.
    """
    if dtype == "bool":
        return Patterns(0xC3, 1, 0)
    head = _QUIET_NAN.get(dtype, "")
    count = tvm.DataType(dtype).itemsize - len(head) // 2
    return Patterns(*(int(head + byte * count, 16) for byte in ("c3", "a5", "9a")))


class GuardedTensor:
    """A CPU tensor of ``shape`` and ``dtype`` between guards, aligned as an address of ``like_address`` is.

    Attributes
    ----------
    tensor
        What to pass to a kernel.
    words
        Its elements as unsigned integers, flat.
    """

    def __init__(self, shape: Sequence[int], dtype: str, like_address: int = 0) -> None:
        self.shape, self.dtype = tuple(int(size) for size in shape), str(dtype)
        self.patterns = patterns_of(self.dtype)
        item = tvm.DataType(self.dtype).itemsize
        size = item * int(np.prod(self.shape, dtype=np.int64))
        memory = np.empty(size + 2 * GUARD_BYTES + _ALIGNMENT, np.uint8)
        start = (like_address - memory.ctypes.data) % _ALIGNMENT
        inside = memory[start : start + size + 2 * GUARD_BYTES].view(f"u{item}")
        count = GUARD_BYTES // item
        self._before, self.words, self._after = inside[:count], inside[count : len(inside) - count], inside[-count:]
        self._before.fill(self.patterns.guard)
        self._after.fill(self.patterns.guard)
        # By way of unsigned integers, for NumPy has no bfloat16 to hand over.
        self.tensor = tvm_ffi.from_dlpack(self.words, require_alignment=0)._create_view(list(self.shape), self.dtype)

    def damage(self) -> str:
        """What was written outside the elements, in words; empty where nothing was."""
        for guard, side in ((self._before[::-1], "before its first"), (self._after, "behind its last")):
            changed = guard != self.patterns.guard
            if changed.any():
                return f"{int(changed.sum())} element(s) {side} one, the nearest {int(changed.argmax()) + 1} away"
        return ""

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


def call_guarded(name: str, function: Callable[..., Any], arguments: Sequence[Any], outputs: Sequence[int]) -> None:
    """Call kernel ``function`` on guarded copies of ``arguments``; what it writes goes to those numbered ``outputs``.

    Arguments that are no tensors are passed as they are.

    Raises
    ------
    MemoryGuardError
        where it writes outside a tensor or to an input, or leaves an element of an output unwritten.
    """
    guarded = {
        i: _guarded(argument) for i, argument in enumerate(arguments) if isinstance(argument, tvm.runtime.Tensor)
    }
    results = {i: guarded[i] for i in outputs}
    call = _Call(
        name, function, [guarded[i].tensor if i in guarded else argument for i, argument in enumerate(arguments)]
    )
    originals = {i: copy.words.copy() for i, copy in guarded.items() if i not in results}
    call.run(guarded, originals, {i: copy.patterns.first for i, copy in results.items()})
    left = {i: copy.words == copy.patterns.first for i, copy in results.items()}
    if any(flags.any() for flags in left.values()):  # perhaps results that happen to be the pattern: try another
        call.run(guarded, originals, {i: copy.patterns.second for i, copy in results.items()})
        for i, copy in results.items():
            _check_written(name, i, copy, left[i] & (copy.words == copy.patterns.second))
    for i, copy in results.items():
        copy.tensor.copyto(arguments[i])


def _guarded(tensor: Tensor) -> GuardedTensor:
    if tensor.device != tvm.cpu():
        raise TargetError(f"guarded memory is for CPUs, and a tensor lies on {tensor.device}.", "build for a CPU")
    copy = GuardedTensor(tensor.shape, str(tensor.dtype), _address(tensor))
    tensor.copyto(copy.tensor)
    return copy


def _address(tensor: Tensor) -> int:
    return int(tensor.data_ptr())


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    function: Callable[..., Any]
    passed: Sequence[Any]

    def run(
        self, guarded: Mapping[int, GuardedTensor], originals: Mapping[int, Words], fill: Mapping[int, int]
    ) -> None:
        """Call the kernel, its outputs filled beforehand, and look at guards and inputs afterwards."""
        for position, pattern in fill.items():
            guarded[position].words.fill(pattern)
        try:
            self.function(*self.passed)
        except RuntimeError as error:  # an assertion in a parallel loop comes as "Task 1 error: ..."
            if _WORKSPACE_ERROR not in str(error):
                raise
            raise MemoryGuardError(str(error).partition("error: ")[2]) from error
        for position, copy in guarded.items():
            where = f"its argument {position} ({copy})"
            damage = copy.damage()
            if damage:
                raise MemoryGuardError(f"kernel {self.name} writes outside {where}: {damage}.", _REPORT)
            if position in originals and not np.array_equal(copy.words, originals[position]):
                raise MemoryGuardError(f"kernel {self.name} writes to {where}, which is an input.", _REPORT)


def _check_written(name: str, position: int, copy: GuardedTensor, unwritten: npt.NDArray[np.bool_]) -> None:
    if unwritten.any():
        first = np.unravel_index(int(unwritten.argmax()), copy.shape or (1,))
        raise MemoryGuardError(
            f"kernel {name} leaves {int(unwritten.sum())} element(s) of its argument {position} ({copy}) unwritten, "
            f"the first at {list(map(int, first))}.",
            _REPORT,
        )


_REPORT = "the kernel is wrong: report it with the model; enable_roller=False builds stock TVM's instead"


_OF_THE_MACHINE = ("vm.", "shape_func")
"""How functions begin that are no kernels: the VM's own, and stock TVM's arithmetic on extents, in the VM's heap."""


class _Guard:
    """The instrument of a VirtualMachine that runs every kernel in guarded memory.

    The VM allocates a tensor right before the kernel that writes it; a tensor that no kernel has seen yet is therefore
    an output of the next one that gets it.
    """

    def __init__(self) -> None:
        self._fresh: dict[int, Any] = {}  # by address

    def __call__(self, function: Callable[..., Any], name: str, before: bool, result: Any, *arguments: Any) -> int:
        if name.startswith(_OF_THE_MACHINE):
            if name == "vm.builtin.alloc_tensor" and not before:
                self._fresh[_address(result)] = result
            return NO_OP
        if not before:
            return NO_OP
        tensors = [(i, argument) for i, argument in enumerate(arguments) if isinstance(argument, tvm.runtime.Tensor)]
        outputs = [i for i, item in tensors if self._fresh.pop(_address(item), None) is not None]
        call_guarded(name, function, arguments, outputs)
        return SKIP_RUN


def guard(machine: relax.VirtualMachine) -> relax.VirtualMachine:
    """``machine``, whose kernels from now on run in guarded memory; `call_guarded` says what is an error of a run."""
    machine.set_instrument(_Guard())
    return machine


def build_guarded(mod: tvm.IRModule, target: Any = "llvm", **settings: Any) -> relay.Library:
    """`relay.build` for a CPU with workspaces between guards; all machines of the library run in guarded memory."""
    passes = pass_pipeline.kernel_passes
    guarding = mock.patch.object(pass_pipeline, "kernel_passes", lambda *given: [*passes(*given), GuardWorkspaces()])
    with guarding:
        library = relay.build(mod, target, **settings)
    plain = library.vm
    library.__dict__["vm"] = lambda device=None: guard(plain(device))
    return library
