"""TensorIR functions of the benchmark's cases, as a model importer would make them. Needs TVM's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases import Case

from tvm_ext._tvm import te, topi


def program(case: Case) -> Any:
    """An unscheduled PrimFunc of ``case``: inputs in order, then the output."""
    inputs = [te.placeholder(item.shape, item.dtype, item.name) for item in case.inputs]
    output = PROGRAMS[case.operator](case, *inputs)
    func = te.create_prim_func([*inputs, output])
    return func.with_attr("global_symbol", function_name(case))


def function_name(case: Case) -> str:
    return "".join(character if character.isalnum() else "_" for character in case.id)


def _sums(case: Case) -> str:
    return {"int8": "int32"}.get(case.inputs[0].dtype, "float32")


def _matmul(case: Case, x: Any, w: Any, *bias: Any) -> Any:
    lead = case.output.shape[:-2]
    k = te.reduce_axis((0, case.inputs[0].shape[-1]), "k")
    wide = _sums(case)

    def element(*at: Any) -> Any:
        *batch, i, j = at
        return te.sum(x(*batch, i, k).astype(wide) * w(*batch, k, j).astype(wide), axis=k)

    total = te.compute((*lead, *case.output.shape[-2:]), element, "matmul")
    if bias:
        total = te.compute(total.shape, lambda *at: total(*at) + bias[0](at[-1]).astype(wide), "add")
        total = topi.nn.relu(total)
    return total if wide == case.output.dtype else topi.cast(total, case.output.dtype)


def _convolution(case: Case, x: Any, w: Any) -> Any:
    settings = case.attributes
    arguments = (x, w, settings["stride"], list(settings["pads"]), settings["dilation"])
    if case.operator == "depthwise":
        return topi.nn.depthwise_conv2d_nchw(*arguments)
    convolve = topi.nn.conv2d_nhwc if settings["layout"] == "NHWC" else topi.nn.conv2d_nchw
    total = convolve(*arguments, out_dtype=_sums(case))
    return total if _sums(case) == case.output.dtype else topi.cast(total, case.output.dtype)


def _average_pool(case: Case, x: Any) -> Any:
    kernel, stride, pads = (case.attributes[name] for name in ("kernel", "stride", "pads"))
    return topi.nn.pool2d(
        x,
        list(kernel),
        [stride] * 2,
        [1, 1],
        list(pads),
        "avg",
        ceil_mode=False,
        layout="NCHW",
        count_include_pad=False,
    )


def _layer_norm(_case: Case, x: Any, gamma: Any, beta: Any) -> Any:
    return topi.nn.layer_norm(x, gamma, beta, axis=[len(x.shape) - 1], epsilon=1e-5)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "batch_matmul": _matmul,
    "conv2d": _convolution,
    "depthwise": _convolution,
    "average_pool": _average_pool,
    "relu": lambda _case, x: topi.nn.relu(x),
    "sum": lambda case, x: topi.sum(x, axis=list(case.attributes["axes"])),
    "softmax": lambda _case, x: topi.nn.softmax(x, axis=-1),
    "layer_norm": _layer_norm,
}
"""By `Case.operator`."""
