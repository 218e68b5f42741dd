"""How a group of computations is run, one record for CPUs and GPUs; a function and its `KernelChoice` of several of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import (
    ALREADY_SCHEDULED,
    Buffer,
    BufferStore,
    For,
    GlobalVar,
    IRModule,
    PrimFunc,
    Stmt,
    TensorLoad,
    functions_of,
    nodes_in,
    tirx,
)
from tvm_ext.analysis.computation_exprs import count_flops, count_operations, itemsize_bytes, tensor_bytes
from tvm_ext.analysis.computations import Computation, OperatorBody, dtype_of, substitute
from tvm_ext.analysis.predicates import is_in
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import allocate, sequence
from tvm_ext.ir.float_ir import with_own_bindings
from tvm_ext.ir.llvm_functions import with_texts
from tvm_ext.ir.simt_ir import SimtKernel
from tvm_ext.records.choice import CHOICE, ConstantPack, GpuPlan, KernelChoice, Path
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import to_json
from tvm_ext.records.tuning import GpuTile
from tvm_ext.support.limits import check_count


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Form:
    """One way to run a group of computations: its statements, the rProgram that they follow, and what to say of it.

    ``packs``: parameters to repack at compile time, each as the buffer that replaces it and how; CPUs only. ``gpu``:
    what the emitter planned of threads and memory; GPUs only. ``expected_s``: the model's seconds, where there is no
    rProgram to say them. ``tile``: what a search may choose of a GPU's kernel, under the key ``workload``; ``pinned``
    where it was chosen, stages included.
    """

    path: Path
    statements: tuple[Stmt, ...]
    program: RProgram | None
    notes: tuple[str, ...]
    packs: tuple[tuple[Buffer, ConstantPack], ...] = ()
    gpu: GpuPlan | None = None
    expected_s: float | None = None
    tile: GpuTile | None = None
    workload: str = ""
    pinned: bool = False

    def with_notes(self, *more: str) -> Form:
        return replace(self, notes=(*self.notes, *more))


def body_of(forms: Sequence[Form], operator: OperatorBody) -> Stmt:
    """The statements of all forms in order, with the buffers that pass between them; LimitPassed where too many."""
    statements = [statement for form in forms for statement in form.statements]
    body = sequence(*_allocations(statements, operator), *statements)
    check_count("kernel_operations", count_operations(body), "operations in its kernels")
    return body


def _allocations(statements: Sequence[Stmt], operator: OperatorBody) -> list[Stmt]:
    """Allocations of the buffers that the statements still write: neither parameters nor kept in rows or tiles.

    Raises IllegalRewrite for one that is read alone: TVM would say that it is used before its definition.
    """
    written = [store.buffer for store in nodes_in(list(statements), BufferStore)]
    read = [load.source for load in nodes_in(list(statements), TensorLoad)]
    inner = [computation.target for computation in operator.computations if not operator.is_output(computation.target)]
    for buffer in inner:
        if is_in(buffer, read) and not is_in(buffer, written):
            raise IllegalRewrite(f"{buffer.name} is read, and no kernel of {operator.name} writes it")
    return [allocate(buffer) for buffer in inner if is_in(buffer, written)]


def function_like(func: PrimFunc, params: Sequence[Buffer], body: Stmt) -> PrimFunc:
    """A function with ``func``'s attributes and result, of plain loops."""
    made = tirx.PrimFunc(list(params), with_texts(body), func.ret_type).with_attrs(
        {**(func.attrs or {}), "s_tir": True}
    )
    return with_own_bindings(made)


def packed_params(params: Sequence[Buffer], forms: Sequence[Form]) -> list[Buffer]:
    """The function's parameters, those repacked at compile time in the form that their kernel reads."""
    packed = list(params)
    for form in forms:
        for buffer, how in form.packs:
            packed[how.param_index] = buffer
    return packed


def any_alignment(params: Sequence[Buffer], body: Stmt) -> tuple[list[Buffer], Stmt]:
    """The parameters without TVM's promise of 64-byte alignment, which a NumPy array handed to the VM does not keep.

    Vector instructions for unaligned addresses cost nothing where the address happens to be aligned.
    """
    relaxed = [
        tirx.decl_buffer(
            param.ty.shape, dtype_of(param), param.name, data_alignment=max(1, int(itemsize_bytes(dtype_of(param))))
        )
        for param in params
    ]
    return relaxed, substitute(body, list(zip(params, relaxed, strict=True)))


def choice_of(operator: OperatorBody, forms: Sequence[Form], notes: Sequence[str], device: DeviceSpec) -> KernelChoice:
    """What ``forms``, which run all groups of the operator, come to; ``notes`` say all that is to be said of them."""
    main = max((form for form in forms if form.program is not None), key=_predicted_s, default=None)
    expected = [form.expected_s for form in forms if form.expected_s is not None]
    return KernelChoice(
        operator=operator.name,
        path="rtile" if any(form.path == "rtile" for form in forms) else "rows",
        notes=tuple(notes),
        device=device.name,
        flops=sum(flops_of(computation) for computation in operator.computations),
        bytes=sum(tensor_bytes(param) for param in operator.params),
        program=None if main is None else main.program,
        packs=tuple(how for form in forms for _, how in form.packs),
        gpu=tuple(form.gpu for form in forms if form.gpu is not None),
        expected_s=sum(expected) if expected else None,
        tile=None if main is None else main.tile,
        workload="" if main is None else main.workload,
    )


def _predicted_s(form: Form) -> float:
    assert form.program is not None
    return form.program.prediction.time_s


def notes_of(forms: Sequence[Form]) -> list[str]:
    return [note for form in forms for note in form.notes]


def flops_of(computation: Computation) -> float:
    return (count_flops(computation.value) + (1.0 if computation.is_reduction else 0.0)) * computation.point_count


def fused_note(epilogue: Sequence[Computation], border: Computation | None = None) -> str:
    fused = f" with {', '.join(computation.name for computation in epilogue)} fused" if epilogue else ""
    return fused if border is None else f"{fused}, between the borders of a padded tensor"


def gpu_form(path: Path, kernel: SimtKernel, program: RProgram | None, notes: Sequence[str]) -> Form:
    """A GPU emitter's kernel as a `Form`."""
    assert not kernel.packs, "constants are not announced to GPU emitters"
    planned = GpuPlan(
        launches=sum(isinstance(statement, For) for statement in kernel.statements),
        blocks=kernel.blocks,
        threads=kernel.threads,
        shared_bytes=kernel.shared_bytes,
        register_count=kernel.register_count,
    )
    return Form(path=path, statements=kernel.statements, program=program, notes=tuple(notes), gpu=planned)


def first_and_count(refusals: Sequence[str]) -> list[str]:
    """The first refusal in words and the number of the others: they mostly repeat it."""
    if not refusals:
        return []
    others = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    return [f"not taken: {refusals[0]}{others}"]


# --- a module's functions ------------------------------------------------------------------------------------------
def unscheduled(mod: IRModule) -> Iterator[tuple[GlobalVar, PrimFunc]]:
    """(global variable, function) of the PrimFuncs of ``mod`` that nobody has scheduled yet."""
    for gv, func in functions_of(mod).items():
        if not (func.attrs and ALREADY_SCHEDULED in func.attrs):
            yield gv, func


def with_choice(kernel: PrimFunc, choice: KernelChoice) -> PrimFunc:
    """``kernel`` as whoever comes next finds it: scheduled, its `KernelChoice` attached."""
    return kernel.with_attr(CHOICE, to_json(choice)).with_attr(ALREADY_SCHEDULED, True)
