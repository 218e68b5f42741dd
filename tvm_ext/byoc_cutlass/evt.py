"""Epilogues as visitor trees: an `Epilogue` becomes ``Sm80EVT`` or ``Sm90EVT`` types and the argument they start with.

The types are the package's own tracer's (`_cutlass`), which needs no GPU. Added here are functions that it does not
know (`OWN_FUNCTIONS`), casts inside an expression, negative constants, and the argument as a text of C++: the package
only builds it as a structure of ctypes, of one size of problem.

What an expression says twice is one node. A shared node makes the tracer write a topological visitor; ``x * x`` reads
its value through an identity, since the tracer's graph has one edge between two nodes.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from dataclasses import dataclass
from typing import Any, Literal

from tvm_ext.records.partition import ACCUMULATOR, EpilogueOperand

from . import _cutlass
from .elements import ELEMENTS
from .epilogue import Epilogue, Reduction
from .host import once

Generation = Literal["2.x", "3.x"]
"""Of CUTLASS's templates: threadblocks of warps up to sm_89, collectives of sm_90."""


OWN_FUNCTIONS = once(
    "OWN_FUNCTIONS",
    """
namespace tvm_ext {

// A function of one element for arrays of them, as visitors call it.
template <class Array, class Function>
CUTLASS_HOST_DEVICE Array each(Array const& values, Function function) {
  Array result;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Array::kElements; ++i) { result[i] = function(values[i]); }
  return result;
}

// log(1 + exp(x)), which neither overflows for large x nor loses the small ones.
template <class Array> struct Softplus {
  CUTLASS_HOST_DEVICE Array operator()(Array const& values) const {
    return each(values, [](float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); });
  }
};

// CUTLASS's tanh is tanh.approx, right to 11 bits: these are for results of more.
template <class Array> struct Tanh {
  CUTLASS_HOST_DEVICE Array operator()(Array const& values) const {
    return each(values, [](float x) { return tanhf(x); });
  }
};

template <class Array> struct GeluTanh {
  CUTLASS_HOST_DEVICE Array operator()(Array const& values) const {
    return each(values, [](float x) {
      return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    });
  }
};

}  // namespace tvm_ext
""",
)

_LIBRARY_ACTIVATIONS = {
    "relu": "ReLU", "gelu": "Gelu", "gelu_tanh": "GeluTaylor", "silu": "SiLU", "hardswish": "HardSwish",
    "sigmoid": "Sigmoid", "tanh": "Tanh", "identity": "Identity",
}  # fmt: skip
_LIBRARY_FUNCTIONS = {"maximum": "Maximum", "minimum": "Minimum", "exp": "Exp"}
# CUTLASS's extremes give the number of a number and a NaN; ours keep the NaN, as Relax's do.
_NAN_KEEPING = {f"cutlass::{name}": f"cutlass::{name}_with_nan_propagation" for name in ("maximum", "minimum")} | {
    "cutlass::atomic_maximum": "::tvm_ext::AtomicMaximum"
}
REDUCED = "reduced"
"""The tracer's name of the vector that a reduction stores."""
_COLLECTIVE_REDUCTION = re.compile(r"(cutlass::epilogue::fusion::Sm90(?:Row|Col)Reduction<.*?\n>);", re.DOTALL)
_OPERATORS = {ast.Add: "Plus", ast.Sub: "Minus", ast.Mult: "Multiplies", ast.Div: "Divides"}
_APPROXIMATE_BITS = 16  # results so narrow have no more bits than tanh.approx, which is right to 11 (PTX ISA)
_EXAMPLE = (96, 160)  # M, N: any problem has the same types, so long as M and N differ from 1 and each other
_EXAMPLE_BATCH = 2  # any but 1
_SOURCE = "C"
"""The tracer's name of the tensor that 3.x templates load themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisitorTree:
    """C++ of an epilogue: the types' ``declarations``, the name of the outermost, the expression of its argument.

    The argument reads ``call.operands`` in the epilogue's order, ``ldd``, of batches ``call.operand_batches`` and
    ``call.batch_d``, and, in 2.x templates, ``d``.
    """

    declarations: str
    name: str
    argument: str


@functools.lru_cache(maxsize=256)
def visitor_tree(
    epilogue: Epilogue,
    accumulator: str,
    generation: Generation,
    *,
    batched: bool = False,
    source: int | None = None,
    planes: bool = False,
) -> VisitorTree:
    """The visitor tree of ``epilogue`` over sums of type ``accumulator``; ``batched``: of several products.

    ``source`` is the operand, a whole matrix, that a 3.x template loads itself, as its tensor C. With ``planes`` a
    convolution's result is stored NCHW (``planes.cuh``).

    Raises UnsupportedEnvironmentError where the package is absent or of another version.
    """
    frontend = _frontend_type()(epilogue, accumulator, generation, batched=batched, source=source)
    frontend.trace(None)
    graph = frontend.dag_ir
    emitter = importlib.import_module("cutlass_cppgen.backend.evt.backend.emitter_base")
    callbacks = emitter.FusionCallbacks(graph, frontend.cc, emit_CD=generation == "2.x")
    _put_own_functions(graph, frontend.own)
    declarations, name = callbacks.emit()
    argument = _Arguments(epilogue, frontend.constants, batched=batched)
    if planes:
        argument.store = "{d, call.p * call.q, call.k}"
    arguments = argument.of_graph(graph)
    top = graph.nodes_topological_order()[-1] if generation == "2.x" else graph.get_all_inputs("D")[0]
    declarations = declarations.strip().replace(">,\n    >", ">\n    >")  # no comma before what closes a list
    for library, kept in _NAN_KEEPING.items():
        declarations = re.sub(rf"{library}\b", kept, declarations)
    if generation == "3.x":
        declarations = _COLLECTIVE_REDUCTION.sub(r"::tvm_ext::StoredAlone<\1>;", declarations)
    if planes:
        declarations = declarations.replace("cutlass::epilogue::threadblock::VisitorAuxStore<", "tvm_ext::PlanesStore<")
    return VisitorTree(declarations=declarations, name=name, argument=arguments[top])


# --- tracing ---------------------------------------------------------------------------------------------------------
class _EpilogueNodes:
    """Puts the nodes of one epilogue into the tracer's graph.

    The tracer's front end is its base as well (`_frontend_type`), which is only there once the package is imported.
    """

    def __init__(
        self, epilogue: Epilogue, accumulator: str, generation: Generation, *, batched: bool, source: int | None
    ) -> None:
        self.cc = 80 if generation == "2.x" else 90
        super().__init__(self.cc)  # type: ignore[call-arg]
        self.base: Any = self  # the methods of the tracer's front end, which no type checker sees
        self.library = importlib.import_module("cutlass_library")
        self.functions = importlib.import_module("cutlass_cppgen.backend.library")
        self.tensors = importlib.import_module("cutlass_cppgen.backend.evt.ir.tensor")
        self.epilogue, self.accumulator = epilogue, accumulator
        self.example = (_EXAMPLE_BATCH if batched else 1, *_EXAMPLE)
        self.operand_names = [_SOURCE if i == source else operand_node(i) for i in range(len(epilogue.operands))]
        self.known: dict[str, str] = {}  # a subexpression's dump to its node
        self.own: dict[str, str] = {}  # node to the C++ template that its function is
        self.constants: dict[str, float] = {}

    def parse(self, _inputs: None) -> None:
        """What the tracer asks for, before it looks at the graph."""
        self.base.add_load_node(ACCUMULATOR, self.tensor(self.example, self.accumulator))
        for number, operand in enumerate(self.epilogue.operands):
            self.base.add_load_node(self.operand_names[number], self.tensor(self.shape_of(operand), operand.dtype))
        tree = self.epilogue.tree()
        value = self.node(tree)
        if not _converts(tree):
            value = self.identity(value)
        if self.epilogue.reduction is not None:
            reduced = self.reduce(value, self.epilogue.reduction)
            self.store(reduced, REDUCED, self.shape_left(self.epilogue.reduction))
            if self.cc == 90:  # the tracer asks for D, whose place in the tree the reduction takes
                self.store(value, "D", self.example)
        else:
            self.store(value, "D", self.example)

    def store(self, value: str, name: str, shape: tuple[int, int, int]) -> None:
        """``value`` is what is stored, as the tensor ``name``."""
        self.base.add_store_node(name)
        self.base.add_edge(value, name)
        self.base.set_store_tensor(name, self.tensor(shape, self.epilogue.out_dtype))
        self.base.mark_output(name)
        self.return_names = (name,)

    def reduce(self, value: str, reduction: Reduction) -> str:
        """The tracer knows a reduction by two functions: of registers, and of what is in memory."""
        of = self.functions.FunctionalOp
        both = (of.Plus, of.AtomicAdd) if reduction.function == "sum" else (of.Maximum, of.AtomicMaximum)
        name: str = self.base.add_compute_node(both)
        self.base.add_edge(value, name)
        return name

    def shape_left(self, reduction: Reduction) -> tuple[int, int, int]:
        """Of what is stored in the example problem: one vector for all products of a batch, or one for each."""
        batch, m, n = self.example
        return (1, 1, n) if reduction.over == "rows" else (batch, m, 1)

    def shape_of(self, operand: EpilogueOperand) -> tuple[int, int, int]:
        """Of the operand in the example problem."""
        batch, m, n = self.example
        return (batch if operand.batch_stride else 1, *operand.shape(m, n))

    def data_type(self, dtype: str) -> Any:
        return getattr(self.library.DataType, ELEMENTS[dtype].library)

    def tensor(self, shape: tuple[int, int, int], dtype: str) -> Any:
        row_major = self.library.LayoutType.RowMajor
        return self.tensors.Tensor(shape=shape, layout_tag=row_major, element=self.data_type(dtype))

    def node(self, tree: ast.expr) -> str:
        """The node of an expression; the same one for the same expression."""
        key = ast.dump(tree)
        if key not in self.known:
            self.known[key] = self.new_node(tree)
        return self.known[key]

    def new_node(self, tree: ast.expr) -> str:
        match tree:
            case ast.Name(id=name):
                names = [operand.name for operand in self.epilogue.operands]
                return ACCUMULATOR if name == ACCUMULATOR else self.operand_names[names.index(name)]
            case ast.Constant(value=int() | float() as value):
                return self.constant(float(value))
            case ast.UnaryOp(operand=ast.Constant(value=int() | float() as value)):
                return self.constant(-float(value))
            case ast.BinOp(left=left, op=operator, right=right):
                return self.compute(getattr(self.functions.FunctionalOp, _OPERATORS[type(operator)]), left, right)
            case ast.Call(func=ast.Name(id="cast"), args=[value, ast.Constant(value=str(dtype))]):
                return self.identity(self.node(value), dtype)
            case ast.Call(func=ast.Name(id=function), args=arguments):
                return self.call(function, *arguments)
        raise AssertionError(f"{ast.unparse(tree)} has passed the epilogue's own check")

    def constant(self, value: float) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        self.base.add_load_node(name, self.tensors.Tensor(tensor=value, is_constant=True))
        return name

    def call(self, function: str, *arguments: ast.expr) -> str:
        own = own_function(function, self.epilogue.out_dtype)
        if own is not None:  # the tracer knows no functions but its own: `_put_own_functions` puts ours in its place
            name = self.compute(self.functions.ActivationOp.Identity, *arguments)
            self.own[name] = own
            return name
        if function in _LIBRARY_FUNCTIONS:
            return self.compute(getattr(self.functions.FunctionalOp, _LIBRARY_FUNCTIONS[function]), *arguments)
        return self.compute(getattr(self.functions.ActivationOp, _LIBRARY_ACTIVATIONS[function]), *arguments)

    def compute(self, function: object, *arguments: ast.expr) -> str:
        sources = [self.node(argument) for argument in arguments]
        for i, source in enumerate(sources):
            if source in sources[:i]:
                sources[i] = self.identity(source)
        name: str = self.base.add_compute_node(function)
        for weight, source in enumerate(sources):
            self.base.add_edge(source, name, weight=weight)
        return name

    def identity(self, source: str, dtype: str = "float32") -> str:
        name: str = self.base.add_compute_node(self.functions.ActivationOp.Identity)
        self.base.dag_ir.get_node_meta(name).element_output = self.data_type(dtype)
        self.base.add_edge(source, name)
        return name


@functools.cache
def _frontend_type() -> Any:
    """`_EpilogueNodes` on the tracer's front end; raises as `_cutlass.require`."""
    return type("EpilogueFrontend", (_EpilogueNodes, _cutlass.tracer().PythonASTFrontend), {})


def _converts(tree: ast.expr) -> bool:
    """Whether the visitor of ``tree`` may be told to make the result's type, as that of a sum may and a cast's not.

    In 3.x templates nothing else converts: the last visitor before the store has to be one that computes.
    """
    match tree:
        case ast.BinOp():
            return True
        case ast.Call(func=ast.Name(id=function)):
            return function != "cast"
    return False


def own_function(function: str, out_dtype: str) -> str | None:
    """Of `OWN_FUNCTIONS`, the template for ``function`` and results of ``out_dtype``; None where CUTLASS has one."""
    exact = ELEMENTS[out_dtype].bits > _APPROXIMATE_BITS
    own = {"softplus": "Softplus"} | ({"tanh": "Tanh", "gelu_tanh": "GeluTanh"} if exact else {})
    return f"::tvm_ext::{own[function]}" if function in own else None


def function_template(function: str, out_dtype: str) -> str:
    """The C++ template of arrays that ``function`` of an expression is, as visitors call it."""
    own = own_function(function, out_dtype)
    if own is not None:
        return own
    library = importlib.import_module("cutlass_cppgen.backend.library")
    if function in _LIBRARY_FUNCTIONS:
        name = str(library.FunctionalOpTag[getattr(library.FunctionalOp, _LIBRARY_FUNCTIONS[function])])
        return _NAN_KEEPING.get(name, name)
    return str(library.ActivationOpTag[getattr(library.ActivationOp, _LIBRARY_ACTIVATIONS[function])])


def operand_node(number: int) -> str:
    """The tracer's name of an operand, ``Operand0`` in C++: a user's own might be one that it keeps for itself."""
    return f"operand_{number}"


def _put_own_functions(graph: Any, own: dict[str, str]) -> None:
    """Name our functions in the visitors that were traced with an identity in their place."""
    for meta in graph.node_metas_topological_order():
        subgraph = getattr(meta, "subgraph", None)
        if subgraph is not None:
            _put_own_functions(subgraph, own)
        elif meta.name in own:
            visitor = meta.underlying_impl
            visitor._type_decl = visitor.type_decl.replace("cutlass::epilogue::thread::Identity", own[meta.name])


# --- the argument ----------------------------------------------------------------------------------------------------
class _Arguments:
    """Braced C++ of what starts each visitor: its children's in order, then its own."""

    def __init__(self, epilogue: Epilogue, constants: dict[str, float], *, batched: bool) -> None:
        self.constants = constants
        self.operands = {operand_node(i): (i, operand) for i, operand in enumerate(epilogue.operands)}
        self.reduction, self.batched = epilogue.reduction, batched
        self.store = "{d, {ldd, {}, call.batch_d}}" if batched else "{d, {ldd, {}, {}}}"

    def of_graph(self, graph: Any) -> dict[str, str]:
        """By node of the tree that the tracer has made of its graph."""
        arguments: dict[str, str] = {}
        for node in graph.nodes_topological_order():
            meta = graph.get_node_meta(node)
            if hasattr(meta, "subgraph"):
                arguments[node] = self._of_shared(meta.subgraph, arguments)
                continue
            children = [arguments[child] for child in graph.get_all_inputs(node)]
            arguments[node] = _braces([*children, self._own(node)]) if children else self._own(node)
        return arguments

    def _of_shared(self, subgraph: Any, arguments: dict[str, str]) -> str:
        """A topological visitor takes its nodes one after another, but for the one that reads its result."""
        nodes = subgraph.nodes_topological_order()[:-1]
        own = {n: arguments[n] if subgraph.get_node_meta(n).disabled else self._own(n) for n in nodes}
        return _braces([own[node] for node in nodes])

    def _own(self, node: str) -> str:
        if node in self.constants:
            return f"{{{{{self.constants[node]!r}f}}, {{nullptr}}}}"
        if node == "D":
            return self.store
        if node == REDUCED and self.reduction is not None:
            each = ", {{}, {}, int(call.m)}" if self.batched and self.reduction.over == "columns" else ""
            return f"{{d, {self.reduction.identity}{each}}}"
        if node not in self.operands:
            return "{}"
        number, operand = self.operands[node]
        cpp = ELEMENTS[operand.dtype].cpp
        pointer = f"static_cast<{cpp} const*>(call.operands[{number}])"
        distance = f"call.operand_batches[{number}]" if operand.batch_stride else "{}"
        if operand.role == "scalar":
            assert not operand.batch_stride, "one number for all products"
            return f"{{{{{cpp}(0)}}, {{{pointer}}}}}"
        if operand.role == "matrix":
            return f"{{const_cast<{cpp}*>({pointer}), {cpp}(0), {{ldd, {{}}, {distance}}}}}"
        strides = f", {{{{}}, {{}}, int({distance})}}" if operand.batch_stride else ""
        return f"{{{pointer}, {cpp}(0){strides}}}"


def _braces(parts: list[str]) -> str:
    return "{" + ", ".join(parts) + "}"
