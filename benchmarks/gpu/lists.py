"""The operators of ALCOP's and Bolt's evaluations as cases, and the programs that they need beyond `programs.py`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import Case, Tensor, all_cases, convolution, matmul
from programs import PROGRAMS

from tvm_ext._tvm import te, tirx, topi

HALF = "float16"


BOLT_GROUPS = ("bolt_T3", "bolt_F9")
"""Of Bolt's single products; those of its Tables 1 and 2 are chains."""


def standard_cases(workload: Path) -> list[Case]:
    """What a bundle carries unless it is told otherwise: ``roller_ops.csv`` and, beside it, Bolt's."""
    paper = workload.with_name("bolt_ops.csv")
    single = [case for case in bolt(paper) if case.group in BOLT_GROUPS]
    return [*all_cases(workload), *bolt_chains(paper), *single]


def alcop(workload: Path) -> Iterator[Case]:
    """The rows of ``alcop_ops.csv`` without repetitions: float16 in, float32 out."""
    with workload.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            if not row["dup_of"]:
                yield _wide_result(_alcop(row, f"A{number}"))


def bolt(workload: Path) -> Iterator[Case]:
    """The rows of ``bolt_ops.csv``, pairs one after the other, each with its bias and activation: float16."""
    with workload.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            for part, shape in enumerate(_bolt(row)):
                for activation in re.findall(r"act=(\S+)", row["shape"])[:1] or ["relu"]:
                    for name in activation.split("|"):
                        yield _activated(shape, f"B{number}{'ab'[part]}_{name}", name)


def bolt_chains(workload: Path) -> Iterator[Case]:
    """The pairs of ``bolt_ops.csv``, Tables 1 and 2, as one operator each: C0 ... of the rows' numbers."""
    with workload.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file)):
            parts = _bolt(row)
            if len(parts) > 1:
                yield chained(f"chain_{row['table']}_{number}", parts, bias=parts[0].operator == "conv2d")


def chained(name: str, parts: Sequence[Case], *, bias: bool) -> Case:
    """Products one after the other, each with ReLU behind, and with ``bias`` a row added before: one operator."""
    factors: list[Tensor] = []
    for number, part in enumerate(parts):
        weights, columns = part.inputs[1], part.output.shape[-1:]
        # so small that values keep their size
        factors.append(replace(weights, name=f"w{number}", scale=part.terms**-0.5))
        if bias:
            factors.append(Tensor(name=f"b{number}", shape=columns, dtype=HALF))
    return replace(
        parts[-1],
        id=name,
        group="chains",
        operator="chain",
        inputs=(parts[0].inputs[0], *factors),
        attributes={"links": [{"kind": part.operator, **part.attributes} for part in parts], "bias": bias},
        flops=sum(part.flops for part in parts),
        terms=sum(part.terms for part in parts),
    )


def _wide_result(case: Case) -> Case:
    return replace(case, output=replace(case.output, dtype="float32"))


def _alcop(row: Mapping[str, str], name: str) -> Case:
    numbers = {key: int(value) for key, value in row.items() if value and value.isdigit()}
    kind = row["op"]
    if kind.endswith("MatMul"):
        return matmul(
            name, numbers["M"], numbers["N"], numbers["K"], HALF, group=f"alcop_{kind}", batch=numbers.get("B_or_N", 1)
        )
    batch, height, width = numbers["B_or_N"], numbers["H"], numbers["W"]
    inner, outer, kernel, pad = numbers["CI"], numbers["CO"], (numbers["KH"], numbers["KW"]), numbers["padding"]
    if kind == "Conv2D_NHWC":
        return convolution(
            name, (batch, height, width, inner), (*kernel, inner, outer), stride=numbers["stride"], pads=(pad,) * 4,
            layout="NHWC", dtype=HALF, group="alcop_Conv2D",
        )  # fmt: skip
    depth, stride = numbers["D"], numbers["stride"]
    sizes = zip((depth, height, width), (numbers["KD"], *kernel), strict=True)
    result = [(size + 2 * pad - k) // stride + 1 for size, k in sizes]
    fan_in = inner * numbers["KD"] * kernel[0] * kernel[1]
    points = batch * outer * result[0] * result[1] * result[2]
    return Case(
        id=name, group="alcop_Conv3D", operator="conv3d",
        inputs=(
            Tensor(name="x", shape=(batch, depth, height, width, inner), dtype=HALF),
            Tensor(name="w", shape=(numbers["KD"], *kernel, inner, outer), dtype=HALF),
        ),
        output=Tensor(name="y", shape=(batch, *result, outer), dtype=HALF, scale=0.0),
        attributes={"stride": stride, "pad": pad}, flops=2.0 * points * fan_in, terms=fan_in,
    )  # fmt: skip


def _bolt(row: Mapping[str, str]) -> list[Case]:
    text, group = row["shape"], f"bolt_{row['table']}"
    value = {
        key: int(number) for names, number in re.findall(r"((?:\w+=)+)(\d+)", text) for key in names.split("=") if key
    }
    if row["op"].startswith("gemm_relu"):
        return [matmul("", value["M"], value[f"N{i}"], value[f"K{i}"], HALF, group=group) for i in (0, 1)]
    if row["op"].startswith("gemm"):
        return [matmul("", value["M"], value["N"], value["K"], HALF, group=group)]
    kernel = tuple(map(int, re.findall(r"k=(\d+)x(\d+)", text)[0])) if "k=" in text else (3, 3)
    pads = tuple(map(int, re.findall(r"p=(\d+),(\d+)", text)[0])) if re.search(r"p=\d+,", text) else (1, 1)
    inner, outer = value["IC"], value["OC"]
    # of a pair the first sizes are the first convolution's
    height, width = (int(re.findall(rf"\b{key}=(?:W=)?(\d+)", text)[0]) for key in "HW")
    first = convolution(
        "", (value["N"], height, width, inner), (*kernel, inner, outer), stride=value.get("s", 1), pads=(*pads, *pads),
        layout="NHWC", dtype=HALF, group=group,
    )  # fmt: skip
    if "|" not in text or "act=" in text:
        return [first]
    second = convolution(
        "",
        first.output.shape,
        (1, 1, outer, outer),
        stride=1,
        pads=(0, 0, 0, 0),
        layout="NHWC",
        dtype=HALF,
        group=group,
    )
    return [first, second]


def _activated(case: Case, name: str, activation: str) -> Case:
    """The case under ``name`` with a bias of the last axis and an activation behind."""
    bias = Tensor(name="b", shape=case.output.shape[-1:], dtype=HALF)
    operator = "activated_conv2d" if case.operator == "conv2d" else "activated_matmul"
    attributes = {**case.attributes, "activation": activation}
    return replace(case, id=name, operator=operator, inputs=(*case.inputs, bias), attributes=attributes)


# --- programs -----------------------------------------------------------------------------------------------------
def _activation(name: str, x: Any) -> Any:
    if name == "relu":
        return topi.nn.relu(x)
    if name == "gelu":
        return te.compute(x.shape, lambda *at: x(*at) * 0.5 * (1.0 + tirx.erf(x(*at) * 0.7071067811865476)), "gelu")
    if name == "hardswish":
        return te.compute(x.shape, lambda *at: x(*at) * tirx.max(tirx.min(x(*at) + 3.0, 6.0), 0.0) / 6.0, "hardswish")
    assert name == "softplus"
    return te.compute(x.shape, lambda *at: tirx.log(1.0 + tirx.exp(x(*at))), "softplus")


def _with_activation(case: Case, x: Any, w: Any, bias: Any) -> Any:
    plain = "conv2d" if case.operator == "activated_conv2d" else "matmul"
    wide = replace(case, operator=plain, output=replace(case.output, dtype="float32"))
    total = PROGRAMS[plain](wide, x, w)
    biased = te.compute(total.shape, lambda *at: total(*at) + bias(at[-1]).astype("float32"), "add")
    return topi.cast(_activation(case.attributes["activation"], biased), case.output.dtype)


def _conv3d(case: Case, x: Any, w: Any) -> Any:
    stride, pad = case.attributes["stride"], case.attributes["pad"]
    return topi.nn.conv3d_ndhwc(x, w, [stride] * 3, [pad] * 3, 1, 1, out_dtype=case.output.dtype)


def _chain(case: Case, x: Any, *factors: Any) -> Any:
    rest = iter(factors)
    for settings in case.attributes["links"]:
        x = _link(x, next(rest), settings)
        if case.attributes["bias"]:
            x = _plus_row(x, next(rest))
        x = topi.cast(topi.nn.relu(x), case.output.dtype)
    return x


def _link(x: Any, w: Any, settings: Mapping[str, Any]) -> Any:
    """One product, in float32."""
    if settings["kind"] == "conv2d":
        return topi.nn.conv2d_nhwc(x, w, settings["stride"], list(settings["pads"]), 1, out_dtype="float32")
    k = te.reduce_axis((0, x.shape[1]), "k")
    shape = (x.shape[0], w.shape[1])
    return te.compute(
        shape, lambda i, j: te.sum(x(i, k).astype("float32") * w(k, j).astype("float32"), axis=k), "matmul"
    )


def _plus_row(x: Any, bias: Any) -> Any:
    return te.compute(x.shape, lambda *at: x(*at) + bias(at[-1]).astype("float32"), "add")


PROGRAMS.update(chain=_chain, activated_conv2d=_with_activation, activated_matmul=_with_activation, conv3d=_conv3d)
