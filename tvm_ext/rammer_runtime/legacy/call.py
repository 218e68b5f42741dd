"""A converted kernel's call in TensorIR, by which it takes part in a persistent kernel."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.errors import InputError
from tvm_ext.ir.build_ir import cast_to
from tvm_ext.ir.device_sync import CALL

from .convert import LegacyKernel


def call_task(kernel: LegacyKernel, arguments: Sequence[Expr], task: Expr, thread: Expr, pool: Expr) -> Stmt:
    """rTask ``task`` of ``kernel``: all threads of a block call it, whose numbers are ``thread``.

    ``arguments`` are the kernel's parameters in their order (addresses and numbers), ``pool`` an address of shared
    memory. The call brings the kernel's text.
    """
    if len(arguments) != len(kernel.parameters):
        raise InputError(
            f"{kernel.symbol} has {len(arguments)} arguments",
            f"its parameters are {', '.join(f'{kind} {name}' for kind, name in kernel.parameters)}",
        )
    numbers = (cast_to(task, "int32"), cast_to(thread, "int32"))
    return tirx.Evaluate(tirx.call_intrin("void", CALL, kernel.symbol, *arguments, *numbers, pool, kernel.text))
