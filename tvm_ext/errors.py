"""Every exception that `tvm_ext` raises on purpose.

User errors say what was wrong, at which operator and shape, which limit was passed, and what to do.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

_REMEDY = "\n  remedy: "


class TvmExtError(Exception):
    """Base of every error that `tvm_ext` raises on purpose.

    ``problem``: what is wrong, in one sentence, naming the operator, tensor, shape and limit concerned. ``remedy``:
    what the user can do about it; empty where there is nothing to do.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        if not remedy:  # made again from its text, by what carried it through C++
            problem, _, remedy = problem.partition(_REMEDY)
        super().__init__(f"{problem}{_REMEDY}{remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class UnsupportedEnvironmentError(TvmExtError):
    """The installed TVM, tvm-ffi, compiler or CPU is not one that this plugin can work with."""


class OptionError(TvmExtError, ValueError):
    """A build option or environment variable has a value that is not allowed."""


class TargetError(TvmExtError, ValueError):
    """The target is unknown, misspelt or not supported."""


class ModelError(TvmExtError, ValueError):
    """The model file or module cannot be imported: corrupt, cyclic, unsupported operators, unsafe paths."""


class InputError(TvmExtError, ValueError):
    """An input or parameter has a wrong name, shape or dtype, at build time or at run time."""


class ExportError(TvmExtError, OSError):
    """A library could not be written or read; nothing half-written is left behind."""


class DatabaseError(TvmExtError, OSError):
    """A database of measurements cannot be used: another program's or version's, locked, read-only, full, damaged."""


class MeasurementError(TvmExtError, RuntimeError):
    """Nothing can be built or measured: no tracker, no device, no worker process, no reference to compare with."""


class CompileError(TvmExtError, RuntimeError):
    """A device compiler (nvcc, NVRTC, LLVM) refused a kernel or took too long; the message holds what it said."""


class VerificationError(TvmExtError, RuntimeError):
    """A kernel of a build was interpreted and found wrong, or could not be interpreted."""


class IndexRangeError(TvmExtError, IndexError):
    """An index of a gather or scatter lies outside its axis: in a run, or, where it is constant, in a build."""


class DivisionByZeroError(TvmExtError, ZeroDivisionError):
    """An integer is divided by 0: in a run, or, where the divisor is constant, in a build."""


class ConcurrentUseError(TvmExtError, RuntimeError):
    """Two threads use one `GraphModule`, or the inputs and outputs that a `Machine` keeps, at once or by turns."""


class ForkError(TvmExtError):
    """What is asked for does not work in this process since it was forked from one whose threads were at work."""


class IllegalRewrite(TvmExtError):  # noqa: N818 - the field's word for a refused transformation
    """A rule applies to this operator but may not be carried out; the message is the reason.

    This is the only exception that searches and fallbacks catch. A rule that does not apply at all
    answers ``None`` instead of raising.
    """


class LimitPassed(IllegalRewrite):
    """The operator is too large for a step of the build, see `limits`; the message names what was counted."""


ALL: tuple[type[TvmExtError], ...] = (
    TvmExtError,
    UnsupportedEnvironmentError,
    OptionError,
    TargetError,
    ModelError,
    InputError,
    ExportError,
    DatabaseError,
    MeasurementError,
    CompileError,
    VerificationError,
    IndexRangeError,
    DivisionByZeroError,
    ConcurrentUseError,
    ForkError,
    IllegalRewrite,
    LimitPassed,
)
"""Every class above."""


# --- values of options ------------------------------------------------------------------------------------------------
def suggestion(name: str, known: Iterable[str]) -> str:
    """The nearest of the ``known`` options, else all of them."""
    options = sorted(known)
    nearest = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    listing = "the options are " + ", ".join(options)
    return f"did you mean {nearest[0]!r}? Otherwise, {listing}" if nearest else listing


def wrong_value(name: str, value: object, allowed: str) -> OptionError:
    return OptionError(f"option {name!r} is {value!r}, which is not {allowed}.", f"pass {allowed}")


def check_switch(name: str, value: object) -> None:
    if not (isinstance(value, bool) or (isinstance(value, str) and value == "auto")):
        raise wrong_value(name, value, 'True, False or "auto"')


def check_integer(name: str, value: object, *, minimum: int, maximum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise wrong_value(name, value, f"a whole number from {minimum} to {maximum}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        quoted = [f'"{item}"' for item in allowed]
        raise wrong_value(name, value, f"{', '.join(quoted[:-1])} or {quoted[-1]}")


def check_fraction(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and 0 <= value <= 1):
        raise wrong_value(name, value, "a number from 0 to 1")
