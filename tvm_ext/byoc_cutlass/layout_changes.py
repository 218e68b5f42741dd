"""Layout changes inside a convolution's kernel (Bolt §3.2.3): the first of a network reads NCHW, the last stores it.

In a network in NCHW that runs channels last, a kernel of its own transposes the input, and one the result. A region
takes both in (``planes.cuh``): an iterator reads planes, of a wider type where the graph casts them, and a visitor
stores them. Filters of such a first layer are prepared at compile time: by channel, row, column, and wider by
zeros, so that neighbouring columns are read together. Worked example: 64 filters of 7x7 of 3 channels become (64, 3, 7,
8), a depth of 168 that is read in accesses of 8 columns. Whether that pays, predicted times decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from tvm_ext._tvm import Call, Constant, DataflowVar, Expr, Var, relax
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.relax_values import dtype_of, operator_name, static_shape, value_bytes
from tvm_ext.cost.alignment_model import copied_us
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.partition import REDUCTION_STEPS, CutlassRegion, MatrixLayout
from tvm_ext.support.arithmetic import ceil_div

from .convolutions import WIDEST_RUN
from .graph_values import RESULT, GraphValues
from .selection import candidates_of

TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)  # the axes of permute_dims

_ELEMENT_COST, _RUN_COST = 6, 8
"""Instructions of one element, and of finding a run's channel and row (PTX of ``planes.cuh``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanesSource:
    """NCHW activations that a convolution reads through ``skipped``: a cast, a transposition, a padding of channels."""

    planes: Var
    skipped: tuple[Var, ...]  # in program order
    weight: Constant  # (filter, channel, row, column), as wide as whole runs
    columns: int  # of the window, without what makes runs whole


def source_of(call: Call, values: GraphValues) -> PlanesSource | None:
    """Where ``call``, an NHWC convolution of constant filters, reads a parameter of the function in NCHW; else None."""
    weight = values.constant_of(call.args[1])
    if weight is None or int(call.attrs.groups) != 1 or dtype_of(call.args[0]) not in ("float16", "bfloat16"):
        return None
    value, skipped, seen = call.args[0], [], set()
    while isinstance(value, DataflowVar) and len(values.users_of(value)) == 1:
        bound = values.bindings.get(value)
        name = operator_name(bound)
        turned = "relax.permute_dims" in seen
        if bound is None or name is None or name in seen or not _is_read_through(bound, name, turned=turned):
            break
        seen.add(name)
        skipped.append(value)
        value = bound.args[0]
    if "relax.permute_dims" not in seen or value not in values.func.params:
        return None
    if dtype_of(value) not in (dtype_of(call.args[0]), "float32"):
        return None
    channels = (static_shape(value) or ())[1]
    filters = weight.value.numpy()[..., :channels].transpose(0, 3, 1, 2)
    columns = filters.shape[3]
    wide = np.pad(filters, [(0, 0)] * 3 + [(0, whole_runs(columns) - columns)])
    prepared = relax.const(np.ascontiguousarray(wide), str(weight.value.dtype))
    return PlanesSource(planes=value, skipped=tuple(reversed(skipped)), weight=prepared, columns=columns)


def _is_read_through(call: Call, name: str, *, turned: bool) -> bool:
    if name == "relax.permute_dims":
        return call.attrs.axes is not None and tuple(int(axis) % 4 for axis in call.attrs.axes) == TO_NHWC
    if name == "relax.nn.pad":  # channels of zeros
        zeros = str(call.attrs.pad_mode) == "constant" and float(call.attrs.pad_value) == 0.0
        return zeros and not turned and [int(width) for width in call.attrs.pad_width][:-1] == [0] * 7
    return name == "relax.astype" and dtype_of(call) in ("float16", "bfloat16")


def whole_runs(columns: int) -> int:
    """As many columns as ``columns`` of a window are read as: in whole runs of the width that costs least.

    Worked example: 3 columns as one run of 4 (32 instructions), not two of 2 (40), nor three of 1 (42).
    """
    widths = [1 << power for power in range(WIDEST_RUN.bit_length())]
    costs = {width: ceil_div(columns, width) * (width * _ELEMENT_COST + _RUN_COST) for width in widths}
    best = min(widths, key=lambda width: (costs[width], -width))
    return ceil_div(columns, best) * best


def reading_planes(record: CutlassRegion, source: PlanesSource) -> CutlassRegion:
    """The region whose first factor is the planes, and whose second is what was prepared of the filters."""
    problem, window = record.problem, record.problem.window
    assert window is not None
    n, channels, height, width = static_shape(source.planes) or ()
    _, _, rows, columns = source.weight.value.shape
    depth = int(channels * rows * columns)
    read = replace(
        window,
        input_extents=(n, height, width, channels),
        filter_extents=(int(rows), int(columns)),
        planes_of=dtype_of(source.planes),
    )
    widest = int(VECTOR_BYTES // itemsize_bytes(problem.dtypes[0]))
    first, second = (
        MatrixLayout(order="row", leading_dimension=depth, batch_stride=0, alignment=alignment)
        for alignment in (widest, gcd(widest, depth))
    )
    return replace(record, problem=replace(problem, depth=depth, operands=(first, second), window=read))


def transposed_result(result: Var, record: CutlassRegion, values: GraphValues) -> Var | None:
    """What the region's ``result`` is for alone: its transposition to NCHW, a result of the function; None without."""
    window = record.problem.window
    if window is None or record.problem.anchor == "conv2d_depthwise" or not isinstance(result, DataflowVar):
        return None
    users = values.users_of(result)
    call = values.call_of(users[0], "relax.permute_dims") if len(users) == 1 else None
    if call is None or any(step.function in REDUCTION_STEPS for step in record.epilogue):
        return None
    axes = tuple(int(axis) % 4 for axis in call.attrs.axes or ())
    alone = all(_is_handed_out(user, values) for user in values.users_of(users[0]))
    return users[0] if axes == TO_NCHW and alone else None


def _is_handed_out(user: Var | str, values: GraphValues) -> bool:
    """Whether nothing computes with the value: another operator's kernel would transpose as it reads."""
    return user == RESULT or isinstance(values.bindings.get(user), relax.Tuple)


def storing_planes(record: CutlassRegion, transposed: Var) -> CutlassRegion:
    window = record.problem.window
    assert window is not None
    stored = replace(record.problem, window=replace(window, stores_planes=True))
    return replace(record, value=transposed.name, problem=stored, pattern=f"{record.pattern}_to_nchw")


def pays(changed: CutlassRegion, record: CutlassRegion, copied: tuple[Expr, Expr], device: DeviceSpec) -> bool:
    """Whether the ``changed`` region is predicted to take less than ``record`` and a kernel that makes of one tensor of
    ``copied`` the other."""
    try:
        times = [candidates_of(region, device, 1)[0].time_us for region in (changed, record)]
    except IllegalRewrite:
        return False
    read, written = map(value_bytes, copied)
    return times[0] < times[1] + copied_us(read, written, device)
