"""Small kernel jobs for the tests of measurement: right ones, wrong ones, ones that crash, hang and eat memory."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx

from tvm_ext._tvm import IRModule, save_json
from tvm_ext.records.kernel_job import JobArgument, KernelJob
from tvm_ext.records.measurement import MeasuredWorkload

SIZE = 64
FUNCTION = "kernel"


def job(
    name: str, module: str = "", *, of: str = "scaled", checked: bool = True, argument: JobArgument | None = None
) -> KernelJob:
    """A job whose right result is its input doubled."""
    result = JobArgument(shape=(SIZE,), dtype="float32")
    return KernelJob(
        workload=workload(of),
        configuration=name,
        module=module or scaled(),
        function=FUNCTION,
        target="llvm",
        arguments=(argument or result, result),
        reference=scaled() if checked else "",
    )


def workload(name: str) -> MeasuredWorkload:
    return MeasuredWorkload(
        kind="test", structure=name, layout="", dtype="float32", device="cpu", instructions="", threads=1
    )


def scaled(factor: float = 2.0) -> str:
    """A module that multiplies by ``factor``."""
    source = te.placeholder((SIZE,), name="A")
    return _module(te.create_prim_func([source, te.compute((SIZE,), lambda i: source[i] * factor, name="B")]))


def repeated(times: int) -> str:
    """The same as `scaled`, but slower."""
    source = te.placeholder((SIZE,), name="A")
    axis = te.reduce_axis((0, times), name="k")
    tiny = tirx.Cast("float32", axis) * 1e-30
    return _module(
        te.create_prim_func(
            [source, te.compute((SIZE,), lambda i: te.max(source[i] * 2.0 + tiny, axis=axis), name="B")]
        )
    )


def calling(symbol: str, *arguments: Any) -> str:
    """A module that calls a function of the C library."""
    call = tirx.call_extern("int32", symbol, *arguments)
    source = te.placeholder((SIZE,), name="A")
    body = te.compute((SIZE,), lambda i: source[i] * 2.0 + tirx.Cast("float32", call), name="B")
    return _module(te.create_prim_func([source, body]))


def calloc(count: int) -> Any:
    """So many bytes of memory, as an argument of `calling`."""
    return tirx.call_extern("handle", "calloc", tirx.const(count, "int64"), tirx.const(1, "int64"))


def _module(function: Any) -> str:
    return str(save_json(IRModule({FUNCTION: function.with_attr("global_symbol", FUNCTION)})))
