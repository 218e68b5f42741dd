"""The only home of TVM names that have moved between releases, all as of apache-tvm 0.27.0.post1.

TVM ships no type information: mypy takes every class here for `Any` and checks no use of it. Signatures name them all
the same (`Expr`, `Buffer`, `IRModule` ...), to say what goes in and comes out; a test counts how many still say `Any`.
What stock TVM does not import by itself (the ONNX importer, TVMScript's dialects) is behind a function or left to its
user, which keeps `import tvm_ext` quick.

Where these names were before (0.20 or so, still the majority of what is written about TVM):
``tvm.tir`` is `tirx`, its schedules are `s_tir`; ``tvm.arith`` is ``tvm.sym``; ``struct_info`` is ``ty``;
``stmt_functor.post_order_visit``, ``ir_transform`` and ``substitute`` are tvm-ffi's `structural_walk`,
`structural_map` and `structural_mutate`; ``tvm.nd.array`` is `tensor`; a schedule's ``get_block`` is ``get_sblock``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache as _cache
from typing import TYPE_CHECKING, Any

import tvm
import tvm_ffi
from tvm import IRModule, ir, relax, rpc, s_tir, sym, te, tirx, topi
from tvm.ir import (
    Attrs,
    Call,
    Expr,  # was tir.PrimExpr and relax.Expr
    GlobalVar,
    StringImm,
    TensorLoad,  # was tir.BufferLoad; fields `source` (was `buffer`) and `indices`
    Type,  # was relax.StructInfo; an expression's is its field `ty`
    Var,
)
from tvm.ir import GenericConst as Constant  # was relax.Constant; field `value` (was `data`); make one with relax.const
from tvm.ir.instrument import PassInstrument
from tvm.ir.transform import Pass, PassContext, PassInfo, Sequential
from tvm.relax import BlockBuilder, DataflowBlock, DataflowVar, ExecBuilder, VarBinding, VirtualMachine, dpl
from tvm.relax import Function as RelaxFunction
from tvm.relax import VMExecutable as Executable
from tvm.relax import vm_build as _vm_build
from tvm.relax.backend import cuda as _cuda_backend
from tvm.relax.backend import gpu_generic as _gpu_backend
from tvm.relax.backend import rocm as _rocm_backend
from tvm.relax.backend.cpu_generic import pipeline as _cpu_pipeline
from tvm.relax.expr_functor import PyExprMutator, PyExprVisitor
from tvm.relax.expr_functor import mutator as expr_mutator
from tvm.relax.expr_functor import visitor as expr_visitor
from tvm.runtime import (
    Device,
    Module,  # compiled code
    Tensor,  # an array on a device; make one with `tensor`
)
from tvm.s_tir import (
    SBlock,  # was tir.Block
    SBlockRealize,
    Schedule,
    ScheduleError,
    TensorIntrin,
)
from tvm.s_tir import dlight as _dlight
from tvm.s_tir import pipeline as _s_tir_pipeline
from tvm.sym import Analyzer
from tvm.target import Target
from tvm.target import codegen as _codegen
from tvm.te import Tensor as TeTensor
from tvm.tirx import (
    AllocBuffer,
    Buffer,  # the same class as Var; its shape, dtype and scope are in `.ty`
    BufferStore,
    DeclBuffer,
    For,
    ForKind,
    IndexMap,
    IterVar,
    PrimFunc,
    Stmt,
)
from tvm.tirx.build import split_host_device_mods
from tvm_ffi import Object as Node  # an expression, a statement, a function: whatever the structural functors walk

from tvm_ext import errors

if TYPE_CHECKING:
    import onnx

__all__ = [
    "ALLREDUCE", "ALREADY_SCHEDULED", "CALL_TIR", "IF_THEN_ELSE", "IMPORT_ERRORS", "OPAQUE", "PIPELINE_NAME",
    "RPC_TRACKER_MAGIC", "AllocBuffer", "Analyzer", "Attrs", "BlockBuilder", "Buffer", "BufferStore", "Call",
    "Constant", "DataflowBlock", "DataflowVar", "DeclBuffer", "Device", "ExecBuilder", "Executable", "Expr", "For",
    "ForKind", "GlobalVar", "IRModule", "IndexMap", "IterVar", "Module", "ModuleAction", "Node", "OnnxConverter",
    "Pass", "PassContext", "PassInfo", "PassInstrument", "PassPipelines", "PrimFunc", "PyExprMutator", "PyExprVisitor",
    "RelaxFunction", "RpcCode", "SBlock", "SBlockRealize", "Schedule", "ScheduleError", "Sequential", "Stmt",
    "StringImm", "Target", "TeTensor", "Tensor", "TensorIntrin", "TensorLoad", "Type", "Var", "VarBinding",
    "VirtualMachine", "WalkResult", "assert_structural_equal", "call_pure_extern",
    "convert_onnx_operator", "copy_module", "cpu_dataflow_lower_passes", "cpu_finalize_passes",
    "cpu_library_dispatch_passes", "cuda_compute_version", "dpl", "expr_mutator", "expr_visitor",
    "finalize_device_passes", "functions_of", "gpu_dataflow_lower_passes", "gpu_finalize_passes",
    "gpu_library_dispatch_passes", "gpu_schedule_rules", "has_effects", "import_onnx", "ir", "llvm_get_intrinsic_name",
    "llvm_get_system_cpu", "load_json", "load_static_library", "mma_schedule", "module_pass", "new_vector_op",
    "nodes_in", "onnx_frontend", "onnx_operators", "pack_imports", "pass_instrument", "prim_func_pass", "ptx_call",
    "register_intrin_lowering", "register_relax_pipeline", "register_tir_pipeline", "relax",
    "relax_pipelines", "rpc", "rpc_listen", "rpc_serve_loop", "rpc_tracker", "s_tir", "save_json",
    "split_host_device_mods", "structural_equal", "structural_hash", "structural_map", "structural_mutate",
    "structural_walk", "sym", "target_has_feature", "te", "tensor", "tir_pipelines", "tirx", "topi", "tvm", "tvm_ffi",
    "vm_generate", "vm_link",
]  # fmt: skip

# --- IR nodes -----------------------------------------------------------------------------------------------------
CALL_TIR = ir.Op.get("relax.call_tir")
ALLREDUCE = ir.Op.get("tirx.tvm_thread_allreduce")  # the result is passed as a load of one element
IF_THEN_ELSE = ir.Op.get("prim.if_then_else")  # was tir.if_then_else; make one with tirx.if_then_else

OPAQUE = 8
"""The pattern kind of a PrimFunc that is not to be fused with anything, in its attribute ``op_pattern``."""
ALREADY_SCHEDULED = "tirx.is_scheduled"
"""Attribute of a PrimFunc which stock schedulers (dlight, MetaSchedule) leave alone."""

# --- structural functors (tvm-ffi; they work on TensorIR and on Relax) --------------------------------------------
# They resolve the types of their callbacks, by annotations, at each call, and look for those of a second kind, which
# nobody here has. That took a fifth of our own passes' time.
_functors = tvm_ffi.structural
_functors._callback_type_to_type_index = _cache(_functors._callback_type_to_type_index)
_ORDERS = {order: int(getattr(_functors.WalkOrder, f"{order.upper()}ORDER")) for order in ("pre", "post")}
WalkResult = _functors.WalkResult


def structural_walk(root: Any, callbacks: Any, order: str = "post") -> Any:
    """tvm-ffi's ``structural_walk`` for callbacks of a value alone: one, ``(type, callback)``, or a sequence of these.

    A type may be a tuple of types.
    """
    return _functors._ffi_api.StructuralWalk(root, _entries(callbacks), (), _ORDERS[order])


def nodes_in(root: Any, kinds: Any, order: str = "post") -> list[Any]:
    """The nodes of ``kinds``, a type or a tuple of types, in ``root``, a list or a module's Relax functions."""
    found: list[Any] = []
    bodies = [func.body for func in functions_of(root, RelaxFunction).values()] if isinstance(root, IRModule) else root
    structural_walk(bodies, (kinds, found.append), order)
    return found


def structural_map(root: Any, callbacks: Any, order: str = "post") -> Any:
    """tvm-ffi's ``structural_map``, with callbacks as of `structural_walk`."""
    return _functors._ffi_api.StructuralMap(root, _entries(callbacks), (), _ORDERS[order])


def _entries(callbacks: Any) -> list[tuple[int, Callable[..., Any]]]:
    if callable(callbacks):
        callbacks = (Any, callbacks)
    pairs = (callbacks,) if len(callbacks) == 2 and callable(callbacks[1]) else callbacks
    return [
        (_functors._callback_type_to_type_index(kind, api_name="walk"), callback)
        for kinds, callback in pairs
        for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
    ]


structural_mutate = tvm_ffi.structural_mutate
save_json = ir.save_json
load_json = ir.load_json
structural_equal = tvm_ffi.structural_equal
structural_hash = tvm_ffi.structural_hash
assert_structural_equal = ir.assert_structural_equal

# --- errors -------------------------------------------------------------------------------------------------------
# An exception that crosses TVM's C++ frames comes out as a RuntimeError unless its class is known by name: Ctrl-C while
# a pass runs would be caught, with an empty message, by whoever expects errors of TVM.
for _error in (KeyboardInterrupt, *errors.ALL):
    tvm_ffi.register_error(_error)

# --- passes -------------------------------------------------------------------------------------------------------
ModuleAction = Callable[[IRModule, PassInfo], None]
module_pass = tvm.transform.module_pass
prim_func_pass = tirx.transform.prim_func_pass


def pass_instrument(name: str, before: ModuleAction | None, after: ModuleAction | None) -> PassInstrument:
    """A PassInstrument that calls ``before(module, info)`` and ``after(module, info)`` around every pass; either may
    be None.

    Not by TVM's decorator: that makes a class, which TVM never forgets, and an instance that TVM and Python keep for
    each other, so that whatever it refers to lives as long as the process.
    """
    return tvm.ir.instrument._ffi_instrument_api.PassInstrument(name, None, None, None, before, after)


# `relax.pipeline.dataflow_lower_passes` raises AttributeError in this release; its per-target parts work.
cpu_library_dispatch_passes = _cpu_pipeline.library_dispatch_passes
cpu_dataflow_lower_passes = _cpu_pipeline.dataflow_lower_passes
cpu_finalize_passes = _cpu_pipeline.finalize_passes


def _gpu_pipeline(target: Target) -> Any:
    backends = {"cuda": _cuda_backend, "rocm": _rocm_backend}
    return backends.get(str(target.kind.name), _gpu_backend).pipeline


def gpu_library_dispatch_passes(target: Target) -> list[Pass]:
    """Sorting, scanning and sampling by stock TVM's kernels for the GPU ``target``."""
    return list(_gpu_pipeline(target).library_dispatch_passes(target))


def gpu_dataflow_lower_passes(target: Target) -> list[Pass]:
    return list(_gpu_pipeline(target).dataflow_lower_passes(target))


def gpu_finalize_passes(target: Target) -> list[Pass]:
    return list(_gpu_pipeline(target).finalize_passes(target))


def gpu_schedule_rules() -> tuple[Any, ...]:
    """Stock TVM's default schedules for GPUs (dlight), in the order in which its pipelines try them."""
    gpu = _dlight.gpu
    return gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback()


def mma_schedule(*arguments: Any) -> Schedule:
    """The tensor-core schedule of stock TVM's own tests: a product, its tile factors, layouts and intrinsics."""
    from tvm.testing.tir import mma_schedule as make

    return make(*arguments)


call_pure_extern = tirx.call_pure_extern
"""Of the device language's function, which has no effects: by type, name and arguments."""


def has_effects(op: ir.Op) -> bool:
    """Whether a call of the TensorIR intrinsic ``op`` may do more than compute a value, for all that TVM knows."""
    kind = op.get_attr("TCallEffectKind")
    return kind is None or int(kind) > int(tirx.CallEffectKind.ReadState.value)


def register_intrin_lowering(name: str, target: str, rule: Callable[[Call], Expr], level: int) -> None:
    """Make ``rule``, from call to expression, say how kernels of kind ``target`` compute intrinsic ``name``.

    Of several the one with the highest ``level`` counts; a level can be taken once.
    """
    tirx.op.register_intrin_lowering(name, target, f=rule, level=level)


def new_vector_op(name: str) -> ir.Op:
    """A TensorIR intrinsic of our own, without effects, of which VectorizeLoop makes one of vectors."""
    ir.op._ffi_api.RegisterOp(name, "")
    for key, value in (("TVectorizable", True), ("TCallEffectKind", int(tirx.CallEffectKind.Pure.value))):
        ir.op.register_op_attr(name, key, value)
    return ir.Op.get(name)


def ptx_call(instruction: str, *operands: Expr) -> Call:
    """A call of one PTX instruction with its modifiers, as a PTX source names it; shared memory by pointers to it.

    An instruction or a kind of operand that TVM's table does not have is a ValueError.
    """
    from tvm.backend.cuda.ptx import PTXNamespace

    return PTXNamespace()[instruction](*operands)


# --- target and runtime -------------------------------------------------------------------------------------------
tensor = tvm.runtime.tensor
finalize_device_passes = _s_tir_pipeline.finalize_device_passes
llvm_get_intrinsic_name = _codegen.llvm_get_intrinsic_name
llvm_get_system_cpu = _codegen.llvm_get_system_cpu
target_has_feature = _codegen.target_has_features
load_static_library = tvm.runtime.load_static_library
cuda_compute_version = tvm.support.nvcc.get_target_compute_version


def vm_generate(mod: IRModule) -> tuple[ExecBuilder, IRModule]:
    """Bytecode of the Relax functions of a lowered ``mod``, as a builder, and a module of its PrimFuncs."""
    builder = relax.ExecBuilder()
    left = _vm_build._vmcodegen(builder, mod)
    functions = {gv: func for gv, func in left.functions_items() if isinstance(func, PrimFunc)}
    return builder, tvm.IRModule(functions)


def vm_link(
    builder: ExecBuilder, target: Target, library: Module | None, constants: Mapping[str, Tensor]
) -> Executable:
    """The executable of ``builder``'s bytecode and ``library``'s kernels. A builder can be linked once."""
    return _vm_build.VMExecutable(_vm_build._ffi_api.VMLink(builder, target, library, [], constants))


def pack_imports(module: Module) -> bytes:
    """The modules that ``module`` imports, as an exported library holds them (see `device_modules`)."""
    return bytes(tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")(module).numpy())


def copy_module(mod: IRModule) -> IRModule:
    """A module with the same functions: passes receive the caller's own module and must not write to it."""
    return tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)


def functions_of(mod: IRModule, kind: type = PrimFunc) -> dict[GlobalVar, Any]:
    """The functions of ``mod`` that are of type ``kind``."""
    return {gv: func for gv, func in mod.functions_items() if isinstance(func, kind)}


OnnxConverter = Callable[[BlockBuilder, Sequence[Expr], Mapping[str, Any], int], Expr]
"""Builder, operands, attributes, opset -> result."""


def import_onnx(model: onnx.ModelProto, **options: Any) -> IRModule:
    """Stock `from_onnx`, which imports `onnx` itself (about 0.2 s)."""
    from tvm.relax.frontend.onnx import from_onnx

    return from_onnx(model, **options)


IMPORT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,  # tvm.error.TVMError among them
    TypeError,
    ValueError,
)
"""Everything that the stock importer is known to raise on models it cannot convert."""


def onnx_frontend() -> Any:
    """The module of the stock ONNX importer, which imports `onnx` itself (about 0.2 s)."""
    from tvm.relax.frontend.onnx import onnx_frontend

    return onnx_frontend


def convert_onnx_operator(
    name: str, builder: BlockBuilder, inputs: Sequence[Expr], attributes: Mapping[str, Any], opset: int
) -> Expr:
    """Stock TVM's conversion of one operator, for converters of ours that change its operands only."""
    converter = onnx_frontend()._get_convert_map()[name].get_converter(opset)
    return converter(builder, onnx_frontend().onnx_input(inputs), dict(attributes), [{}, {}])


def onnx_operators() -> list[str]:
    """The names of the operators that stock `from_onnx` has a converter for."""
    return list(onnx_frontend()._get_convert_map())


# --- RPC ----------------------------------------------------------------------------------------------------------
RPC_TRACKER_MAGIC = rpc.base.RPC_TRACKER_MAGIC
RpcCode = rpc.base.TrackerCode
rpc_serve_loop = rpc.server._serve_loop


def rpc_tracker(host: str, port: int) -> Any:
    """A tracker that listens at just that port, as the thread that it runs in. Needs tornado, which servers do not."""
    try:
        from tvm.rpc.tracker import PopenTrackerServerState
    except ImportError as error:
        remedy = "install it with `pip install 'tvm-ext[rpc]'`"
        raise errors.UnsupportedEnvironmentError(
            "TVM's RPC tracker needs the Python package tornado.", remedy
        ) from error
    return PopenTrackerServerState(host, port, port + 1).thread


def rpc_listen(*arguments: Any, serve: Callable[..., None]) -> None:
    """Stock `_listen_loop`, which reports to a tracker and takes clients one by one, with sessions by ``serve``."""
    rpc.server._serving = serve
    rpc.server._listen_loop(*arguments)


# --- registered pipelines -----------------------------------------------------------------------------------------
PassPipelines = dict[str, Callable[..., Any]]


def relax_pipelines() -> PassPipelines:
    """The mutable map from name to factory of Relax pipelines."""
    found: PassPipelines = relax.pipeline.PIPELINE_MAP
    return found


def tir_pipelines() -> PassPipelines:
    """The mutable map from name to factory of TensorIR pipelines."""
    found: PassPipelines = tirx.compilation_pipeline.PIPELINE_MAP
    return found


PIPELINE_NAME = "tvm_ext"
CPU_PIPELINE, RKERNEL_PIPELINE, ROCM_PIPELINE = "tvm_ext.cpu", "tvm_ext.rkernels", "tvm_ext.rocm"
"""Our pipelines, as TVM knows them."""


def register_relax_pipeline(name: str, factory: Callable[..., Pass]) -> None:
    """Make ``relax.get_pipeline(name, **kwargs)`` call ``factory(**kwargs)``; a name that is taken stays as it is."""
    if name not in relax_pipelines():
        relax.register_pipeline(name)(factory)


def register_tir_pipeline(name: str, factory: Callable[[], Any]) -> None:
    """Make ``tirx.get_tir_pipeline(name)`` call ``factory()``; a name that is taken stays as it is."""
    if name not in tir_pipelines():
        tirx.register_tir_pipeline(name, factory)
