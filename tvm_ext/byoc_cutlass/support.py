"""Whether CUTLASS's templates serve a product of the graph, or why not.

The limits are those of the templates in CUTLASS 4.2: which architecture has which types, how many bytes a copy takes,
what the kernels index with. Each refusal is an `IllegalRewrite` whose text names the operator, the shapes and the
limit.
"""

from __future__ import annotations

from math import prod

from tvm_ext._tvm import Call
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.relax_values import described, dtype_of, operator_name, shapes_of, static_shape
from tvm_ext.devices.capabilities import capability_text, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.partition import CutlassProblem, CutlassRefusal

from .convolution_problems import convolution_problem
from .elements import MULTIPLIERS, TEMPLATES_SINCE
from .graph_values import GraphValues
from .matmul_problems import matmul_problem

MATMUL, CONV2D = "relax.matmul", "relax.nn.conv2d"
WITHOUT_TEMPLATES = frozenset(
    f"relax.nn.{name}" for name in ("conv1d", "conv3d", "conv1d_transpose", "conv2d_transpose", "conv3d_transpose")
)
ANCHORS = frozenset({MATMUL, CONV2D}) | WITHOUT_TEMPLATES
"""Operators that get an answer: a problem, or why not."""

NORMS = {"relax.nn.layer_norm": "device_layernorm.h", "relax.nn.rms_norm": "device_rmsnorm.h"}
"""Norms to the header of the package (tools/util) that has a kernel of one."""

TYPES = {name: kind for name, kind in MULTIPLIERS.items() if name == kind.operand}
"""What multiplies each type of operands; float32 on vector units: TF32 would round the operands to 10 bits."""

SMALLEST_COPY_BYTES = 4
"""cp.async copies 4, 8 or 16 bytes (PTX ISA): two halves at least."""

MOST_ELEMENTS = 2**31 - 1
"""Kernels count the elements of a tensor in 32 bits."""


def problem_of(call: Call, values: GraphValues, device: DeviceSpec) -> CutlassProblem | None:
    """The product that ``call`` is; None where it is none. Raises IllegalRewrite, with the reason, where no template
    serves it on ``device``.
    """
    operator = operator_name(call)
    if operator not in ANCHORS:
        return None
    _check_device(device)
    if operator in WITHOUT_TEMPLATES:
        raise IllegalRewrite(
            f"{operator} of {shapes_of(call)}: there are templates for two-dimensional forward convolutions alone",
            "write it as nn.conv2d where that is possible",
        )
    _check_tensors(call)
    _check_types(call, device)
    problem = matmul_problem(call, values) if operator == MATMUL else convolution_problem(call)
    _check_alignment(problem, call)
    return problem


def norms_left(values: GraphValues) -> list[CutlassRefusal]:
    """Each layer and RMS norm of a function, and why it is a kernel of this package's."""
    return [
        CutlassRefusal(value=variable.name, operator=name, reason=_why_no_norm(call, name), remedy="")
        for variable, call in values.bindings.items()
        if (name := operator_name(call) or "") in NORMS
    ]


def _why_no_norm(call: Call, name: str) -> str:
    """The kernels in the package multiply no matrices, and take nothing of what is before or behind a norm along."""
    norm, header = f"{name} of {described(call)}", NORMS[name]
    axes = [int(axis) % len(call.ty.shape) for axis in call.attrs.axes]
    if axes != [len(call.ty.shape) - 1]:
        return f"{norm} along axes {axes}: {header} has one of the last axis"
    if name == "relax.nn.layer_norm" and float(call.attrs.epsilon) != LAYER_NORM_EPSILON:
        return f"{norm} with epsilon {float(call.attrs.epsilon):g}: {header} has one of {LAYER_NORM_EPSILON:g}"
    return f"{norm}: {header} has a kernel of it alone, and one of this package's has its neighbours in it as well"


LAYER_NORM_EPSILON = 1e-5
"""Written out in device_layernorm.h."""


def attention_left(value: str, attention: str, why: str) -> CutlassRefusal:
    """Why the products of ``attention``, which makes ``value``, keep their softmax between them."""
    reason = f"attention of {attention}: {why}; each of its products may have a template"
    return CutlassRefusal(value=value, operator="attention", reason=reason, remedy="")


def _check_device(device: DeviceSpec) -> None:
    why = ""
    if device.kind != "cuda":
        why = f"is a {device.kind} device: CUTLASS is for CUDA"
    elif not has(device, TEMPLATES_SINCE):
        why = f"has compute capability {capability_text(device)}: there are no templates below 7.5 for CUDA 13"
    if why:
        raise IllegalRewrite(f"{device.name} {why}", "kernels of this package serve it")


def _check_tensors(call: Call) -> None:
    """Extents known, nothing empty, everything counted in 32 bits."""
    name = operator_name(call)
    for tensor in (*call.args, call):
        shape, text = static_shape(tensor), described(tensor)
        if shape is None:
            why = f"{name}: an extent of {text} is known only at run time"
            raise IllegalRewrite(why, "give the model's inputs fixed shapes")
        if prod(shape) == 0:
            raise IllegalRewrite(f"{name}: {text} has no elements", "")
        if prod(shape) > MOST_ELEMENTS:
            count = f"{prod(shape)} elements, and kernels count to {MOST_ELEMENTS}"
            raise IllegalRewrite(f"{name}: {text} has {count}", "split the batch")


def _check_types(call: Call, device: DeviceSpec) -> None:
    first, second = (dtype_of(operand) for operand in call.args[:2])
    subject, result = f"{operator_name(call)} of {first}", dtype_of(call)
    if first != second:
        raise IllegalRewrite(f"{subject} and {second}: templates want one type", "cast one of the operands")
    if first not in TYPES:
        taken = ", ".join(sorted(TYPES))
        raise IllegalRewrite(f"{subject}: templates take {taken}", "cast the operands to one of these")
    known = TYPES[first]
    if not has(device, known.since):
        needed = f"needs compute capability {'.'.join(map(str, known.since))}"
        raise IllegalRewrite(f"{subject} {needed}, and {device.name} has {capability_text(device)}", "use float16")
    if result not in known.results:
        stored = " or ".join(known.results)
        why = f"{subject} with a result of {result}: templates store {stored}"
        raise IllegalRewrite(why, "cast the result instead")


def _check_alignment(problem: CutlassProblem, call: Call) -> None:
    """Both operands must be readable in copies of 4 bytes; vector units read element by element.

    So do sm_75's templates for convolutions of halves, on newer devices too: a first layer's three channels.
    """
    if problem.simt or (problem.window is not None and problem.dtypes[0] == "float16"):
        return
    size = itemsize_bytes(problem.dtypes[0])
    wanted = int(SMALLEST_COPY_BYTES // size)
    for label, layout, tensor in zip("AB", problem.operands, call.args, strict=False):
        if layout.alignment < wanted:
            raise IllegalRewrite(
                f"{operator_name(call)}: operand {label}, {described(tensor)}, is read {layout.alignment} element(s) "
                f"at a time, and the smallest copy is of {wanted}",
                f"pad its contiguous extent to a multiple of {int(16 // size)}",
            )
