"""What the CUDA source of every template's kernel has in common: its head, a namespace, and the C functions to call it.

The text is the kernel that a model links to; nothing of the package's own host code is in it. Each text has two entry
points, of the structure that its `CallForm` declares::

    int64_t NAME_workspace_bytes(GemmCall const* call);
    int32_t NAME(GemmCall const* call, void* workspace, int64_t workspace_bytes, void* stream);

Extents and distances are arguments of every launch, and so is the tuning as far as the template leaves it open.
``operands`` are in the epilogue's order. Answers are ``cutlass::Status`` (0 is success); -1 bytes say that the problem
is refused, and too small a workspace is refused before anything runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tvm_ext.records.partition import Order

from . import _cutlass
from .elements import Shape3
from .epilogue import ATOMIC_MAXIMUM, COLLECTIVE_REDUCTION, Epilogue
from .evt import OWN_FUNCTIONS, Generation, VisitorTree
from .host import CallForm, once

LAYOUTS: dict[Order, str] = {"row": "cutlass::layout::RowMajor", "column": "cutlass::layout::ColumnMajor"}


def kernel_symbol(name: str, epilogue: Epilogue | tuple[Epilogue, ...]) -> str:
    """The name of the entry point: the template's ``name`` with what it leaves open, and a digest of the epilogue."""
    return f"tvm_ext_{name}_{hashlib.sha256(repr(epilogue).encode()).hexdigest()[:12]}"


def kernel_text(
    symbol: str,
    form: CallForm,
    *,
    template: str,
    computes: str,
    includes: Iterable[str],
    functions: str,
    body: str,
    operator: str,
    fits: str,
    start: str = "",
) -> str:
    """The source of ``symbol``, whose ``body`` has ``operator`` and ``make_arguments`` of a call.

    ``computes`` says what the ``template`` does with which headers, ``functions`` are ours; ``fits`` is the body of
    the check of extents, ``start`` what is done on the stream before the kernel. Raises UnsupportedEnvironmentError
    where the package is absent or of another version.
    """
    lines = "\n".join(f"#include <{name}>" for name in includes)
    return f"""// {template}
// {computes}
#include <cstdint>
#include <limits>
#include <cutlass/cutlass.h>
{lines}
{functions}
{form.once}
namespace {symbol}_template {{

{body}
}}  // namespace {symbol}_template
{_entry_points(symbol, form, operator=operator, fits=fits, start=start)}"""


def product_comment(epilogue: Epilogue) -> str:
    """The comment of a kernel of one product."""
    return f"D = {epilogue.expression}, {epilogue.out_dtype}. Headers: CUTLASS {_cutlass.VERSION}."


def gemm_shape(shape: Shape3) -> str:
    return f"cutlass::gemm::GemmShape<{', '.join(map(str, shape))}>"


def thread_map(space: str, warp_shape: str, thread_map: str) -> str:
    """C++ by which the visitors' default map of threads is ``thread_map`` for a warp shape of the namespace ``space``.

    The visitors' layout is made of the default map for tensor operations; a warp shape of our own, another type of the
    same extents, has a specialisation of that default.
    """
    return f"""
}}
template <class ThreadblockShape, int PartitionsK, class Element, int ElementsPerAccess>
struct cutlass::epilogue::threadblock::DefaultThreadMapTensorOp<
    ThreadblockShape, {space}::{warp_shape}, PartitionsK, Element, ElementsPerAccess> {{
  using Type = typename {space}::{thread_map};
}};
namespace {space} {{
"""


def collective_epilogue(tree: VisitorTree, loaded: str, layout: str, alignment: int, stored: str = "ElementOut") -> str:
    """C++ of a collective's epilogue with ``tree``; of C element, layout and alignment are ``loaded``, of D the others.

    What is ``stored``, its element, is void where there is no D.
    """
    return f"""
using EpilogueDescriptor = cutlass::epilogue::collective::detail::EpilogueDescriptor<
    TileShape, cutlass::epilogue::collective::EpilogueTileAuto, ElementOut, ElementOut, EpilogueSchedule>;

{tree.declarations}

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, ElementSum, float, {loaded},
    {stored}, {layout}, {alignment}, EpilogueSchedule, {tree.name}>::CollectiveOp;
"""


def own_functions(epilogue: Epilogue, generation: Generation = "2.x") -> str:
    """What the kernel's text has of functions of ours."""
    text, reduction = OWN_FUNCTIONS, epilogue.reduction
    if reduction is not None and generation == "3.x":
        text += once("COLLECTIVE_REDUCTION", COLLECTIVE_REDUCTION)
    if reduction is not None and reduction.function == "max":
        text += once("ATOMIC_MAXIMUM", ATOMIC_MAXIMUM)
    return text


def _entry_points(symbol: str, form: CallForm, *, operator: str, fits: str, start: str) -> str:
    """The C functions of a kernel whose namespace has ``operator`` and ``make_arguments`` of a ``call``.

    ``fits`` is the body of the check of extents, ``start`` what is done on the stream before the kernel.
    """
    call = form.name
    distances = "  int64_t distances[OperandCount + 1] = {};\n" if form.has_distances else ""
    without = "  asked.operand_batches = distances;\n" if form.has_distances else ""
    return f"""
namespace {symbol}_template {{

bool fits({call} const& call) {{
{fits}}}

}}  // namespace {symbol}_template

extern "C" int64_t {symbol}_workspace_bytes({call} const* call) {{
  using namespace {symbol}_template;
  if (!fits(*call)) return -1;
  void const* none[OperandCount + 1] = {{}};
{distances}  {call} asked = *call;
  asked.operands = none;
{without}  auto arguments = make_arguments(asked);
  return static_cast<int64_t>({operator}::get_workspace_size(arguments));
}}

extern "C" int32_t {symbol}({call} const* call, void* workspace, int64_t workspace_bytes, void* stream) {{
  using namespace {symbol}_template;
  if (!fits(*call)) return static_cast<int32_t>(cutlass::Status::kErrorInvalidProblem);
  auto arguments = make_arguments(*call);
  cutlass::Status status = {operator}::can_implement(arguments);
  if (status != cutlass::Status::kSuccess) return static_cast<int32_t>(status);
  if (static_cast<int64_t>({operator}::get_workspace_size(arguments)) > workspace_bytes)
    return static_cast<int32_t>(cutlass::Status::kErrorWorkspaceNull);
{start}  {operator} gemm;
  status = gemm.initialize(arguments, workspace, static_cast<cudaStream_t>(stream));
  if (status == cutlass::Status::kSuccess) status = gemm.run(static_cast<cudaStream_t>(stream));
  return static_cast<int32_t>(status);
}}
"""
