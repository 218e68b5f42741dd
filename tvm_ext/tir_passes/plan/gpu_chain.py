"""Which computations of an operator are a chain of products that one GPU kernel may compute (Bolt, §3.1).

Each product but the last has one reader, the next product, whose rows are its rows and whose reduction are its columns;
what lies between is its epilogue. Convolutions are products of their implicit matrices: behind any NHWC one, 1 x 1 ones
of stride 1 without padding read rows as they were written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import PrimFunc
from tvm_ext.analysis.computation_exprs import itemsize_bytes, tensor_bytes, tensor_expr_of
from tvm_ext.analysis.computations import Computation, OperatorBody, dtype_of, read_operator
from tvm_ext.analysis.gemm_form import GemmForm, gemm_form, supports_mma
from tvm_ext.analysis.predicates import factors_of
from tvm_ext.analysis.tensor_expr import Access, TensorExpr
from tvm_ext.cost.gpu_chain import ChainProduct, ChainTile, ChainTime, ChainUnits, ProductChain, separate_s, why_apart
from tvm_ext.cost.gpu_chain_tiles import construct_chain
from tvm_ext.devices.gpu import FRAGMENT
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.persistent import ChainVerdict
from tvm_ext.records.rprogram import LayerCost, Prediction, RProgram, RTile
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.limits import timed_construction

from .anchors import gpu_anchor
from .plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from .plan_kernels import RowGroup, TileGroup

CHAIN_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainLink:
    """One product of a chain in canonical form, with its axes by their part, and its prologue and epilogue."""

    computation: Computation
    expr: TensorExpr
    form: GemmForm
    group: TileGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainGroup:
    """Products that one kernel computes, first to last, and the tiles that it may have, best predicted first."""

    links: tuple[ChainLink, ...]
    chain: ProductChain
    units: ChainUnits
    ranked: tuple[tuple[ChainTile, ChainTime], ...]

    @property
    def computations(self) -> tuple[Computation, ...]:
        groups = [link.group for link in self.links]
        return tuple(c for group in groups for c in (group.anchor, *group.prologue, *group.epilogue))


def with_chains(
    groups: Sequence[TileGroup | RowGroup], operator: OperatorBody, device: DeviceSpec, *, always: bool
) -> tuple[list[TileGroup | RowGroup | ChainGroup], list[str]]:
    """``groups`` with every chain as one group, and why others that follow each other are none.

    ``always`` takes every chain that fits, else those that the model says pay.
    """
    result: list[TileGroup | RowGroup | ChainGroup] = []
    reasons: list[str] = []
    position = 0
    while position < len(groups):
        run = _run(groups[position:], operator)
        taken = None
        for length in range(len(run), 1, -1):
            made = _chain(run[:length], operator, device, always=always)
            if isinstance(made, ChainGroup):
                taken = made
                break
            reasons.append(f"{', '.join(group.anchor.name for group in run[:length])} apart: {made}")
        result.append(taken or groups[position])
        position += len(taken.links) if taken else 1
    return result, reasons


def _run(groups: Sequence[TileGroup | RowGroup], operator: OperatorBody) -> list[TileGroup]:
    """The products at the beginning of ``groups`` each of which alone reads what the one before it makes."""
    run: list[TileGroup] = []
    for group in groups:
        if not isinstance(group, TileGroup):
            break
        if run:
            made = made_by(run[-1])
            readers = [] if made is None else operator.consumers(made.target)
            if made is None or operator.is_output(made.target) or readers != [group.anchor]:
                break
        run.append(group)
    return run


def judge_gpu_chain(func: PrimFunc, device: DeviceSpec) -> ChainVerdict:
    """What one kernel of a chain gains on a GPU; raises IllegalRewrite where it cannot be one, saying why."""
    with timed_construction():
        operator = simplify_for_gpu(read_operator(func, "chain"))
        groups, reasons = with_chains(plan_for_gpu(operator), operator, device, always=True)
    group = groups[0]
    if len(groups) != 1 or not isinstance(group, ChainGroup):
        raise IllegalRewrite(reasons[0] if reasons else "its products do not follow each other row by row")
    time = group.ranked[0][1]
    return ChainVerdict(
        plan=None,
        fused_us=time.time_s * 1e6,
        separate_us=separate_s(group.chain, device, group.units) * 1e6,
        saved_bytes=group.chain.between_bytes,
        pays=_why_apart(group.links, group.chain, time, device) is None,
    )


def made_by(group: TileGroup) -> Computation | None:
    """What the group makes for others: its epilogue's computation or its product; None where it makes several."""
    if len(group.epilogue) > 1:
        return None
    return group.epilogue[0] if group.epilogue else group.anchor


def _chain(run: Sequence[TileGroup], operator: OperatorBody, device: DeviceSpec, *, always: bool) -> ChainGroup | str:
    """The chain of ``run``'s products, or why they are none."""
    links = _links(run, operator)
    if isinstance(links, str):
        return links
    units = _units(links, device)
    chain = _shape(links, operator)
    if isinstance(chain, str):
        return chain
    tiles = construct_chain(chain, device, units)
    if tiles.refusal is not None:
        return tiles.refusal
    why = None if always else _why_apart(links, chain, tiles.ranked[0][1], device)
    return ChainGroup(links=tuple(links), chain=chain, units=units, ranked=tiles.ranked) if why is None else why


def _links(run: Sequence[TileGroup], operator: OperatorBody) -> list[ChainLink] | str:
    """The products of ``run``, their rows being those of the chain; or why they do not follow each other.

    What the first one's rows are depends on the second one: the first product or its transposed.
    """
    first = _link(run[0], None, operator)
    if isinstance(first, str):
        return first
    made = _followed([first], run[1:], operator)
    if isinstance(made, str):
        turned = _followed([dataclasses.replace(first, form=_turned(first.form))], run[1:], operator)
        return made if isinstance(turned, str) else turned
    return made


def _followed(links: list[ChainLink], run: Sequence[TileGroup], operator: OperatorBody) -> list[ChainLink] | str:
    for group in run:
        link = _link(group, links[-1], operator)
        if isinstance(link, str):
            return link
        links.append(link)
    return links


def _why_apart(links: Sequence[ChainLink], chain: ProductChain, time: ChainTime, device: DeviceSpec) -> str | None:
    """None where one kernel pays, else why not."""
    last = links[-1]
    axes = [last.expr.axes[i] for i in last.form.columns if last.expr.axes[i].extent > 1]
    if axes and last.expr.output.stride(axes[-1].name) != 1:
        return "neighbours in memory are rows of the result, which one kernel would store one by one"
    return why_apart(chain, time, device, _units(links, device))


def _units(links: Sequence[ChainLink], device: DeviceSpec) -> ChainUnits:
    """What computes the products, in one kernel and apart."""
    return "matrix units" if all(supports_mma(link.expr, device) is None for link in links) else "vector units"


def _link(group: TileGroup, before: ChainLink | None, operator: OperatorBody) -> ChainLink | str:
    """The product of ``group``, or why it is none that follows ``before``."""
    computation, expr = gpu_anchor(group, operator)
    form = gemm_form(expr)
    if isinstance(form, str):  # of one row or column: canonical form has dropped that axis
        computation = group.anchor
        expr = tensor_expr_of(computation, name=operator.name, prologue=group.prologue, epilogue=group.epilogue)
        form = gemm_form(expr)
    name = computation.name
    if isinstance(form, str):
        return f"{name}: {form}"
    if factors_of(computation) is None:  # a function of one row and column is computed in its reader
        return f"{name} multiplies something else than two tensors"
    source = None if before is None else made_by(before.group)
    wanted = form.row_input
    if source is not None:
        read = [i for i, load in enumerate(computation.loads()) if load.source.same_as(source.target)]
        if len(read) != 1:
            return f"{name} does not read {source.name} once"
        wanted = read[0]
    if form.row_input != wanted:
        form = _turned(form)
    if prod(expr.axes[i].extent for i in form.batch) > 1:
        return f"{name} is batched: each batch has factors of its own"
    types = {access.dtype for access in expr.inputs}
    if len(types) != 1 or types.isdisjoint(CHAIN_DTYPES):
        return f"{name}: chains are of {', '.join(CHAIN_DTYPES)}, not {' by '.join(sorted(types))}"
    link = ChainLink(computation=computation, expr=expr, form=form, group=group)
    return link if before is None else _follows(before, link) or link


def _turned(form: GemmForm) -> GemmForm:
    """The transposed product."""
    return dataclasses.replace(
        form, rows=form.columns, columns=form.rows, row_input=form.column_input, column_input=form.row_input
    )


def _follows(before: ChainLink, link: ChainLink) -> str | None:
    """None where the rows and the reduction of ``link`` read what ``before`` has in its rows and columns."""
    written, read = before.expr.output, link.expr.inputs[link.form.row_input]
    name, other = link.computation.name, before.computation.name
    offsets = [None if None in access.indices else access.origin for access in (written, read)]
    if prod(written.shape) != prod(read.shape) or offsets[0] != offsets[1]:
        return f"{name} reads a part of {other}"
    rows = _digits(before.expr, before.form.rows, written), _digits(link.expr, link.form.rows, read)
    columns = _digits(before.expr, before.form.columns, written), _digits(link.expr, link.form.reduction, read)
    if None in (*rows, *columns):
        return f"{name} reads {other} at an index that is not affine"
    if rows[0] != rows[1]:
        return f"rows of {name} need other rows of {other} than their own"
    if columns[0] != columns[1]:
        return f"{name} does not add up over the columns of {other}"
    return None


def _digits(expr: TensorExpr, positions: Sequence[int], access: Access) -> tuple[tuple[int, int], ...] | None:
    """(extent, stride) of a fused axis in ``access``, runs of memory as one: equal ones count the same elements.

    Worked example: (n, h, w) of extents (2, 7, 7) in rows of 64 channels is one run of 98 elements 64 apart.
    """
    digits: list[tuple[int, int]] = []
    for position in positions:
        axis = expr.axes[position]
        stride = access.stride(axis.name)
        if stride is None:
            return None
        if axis.extent == 1:
            continue
        if digits and digits[-1][1] == stride * axis.extent:
            digits[-1] = (digits[-1][0] * axis.extent, stride)
        else:
            digits.append((axis.extent, stride))
    return tuple(digits)


def _shape(links: Sequence[ChainLink], operator: OperatorBody) -> ProductChain | str:
    """The chain's extents and traffic; a reason where they do not fit each other."""
    products = []
    rows = 0
    for link in links:
        extents = [prod(link.expr.axes[i].extent for i in group) for group in _groups(link.form)]
        rows = extents[0]
        products.append(
            ChainProduct(
                columns=extents[1],
                depth=extents[2],
                weight_bytes=_read_bytes(link, link.form.column_input),
                epilogue_bytes=_epilogue_bytes(link),
            )
        )
    made = made_by(links[-1].group)
    dtypes = {link.expr.inputs[0].dtype for link in links}
    if len(dtypes) != 1:
        return f"its products have factors of {' and '.join(sorted(dtypes))}"
    between = {dtype_of(consumer.target) for link in links[:-1] if (consumer := made_by(link.group)) is not None}
    if between != dtypes:
        return f"{' and '.join(sorted(between))} between products of {' and '.join(sorted(dtypes))}"
    dtype = dtypes.pop()
    return ProductChain(
        rows=rows,
        products=tuple(products),
        dtype=dtype,
        itemsize=int(itemsize_bytes(dtype)),
        input_bytes=_read_bytes(links[0], links[0].form.row_input),
        output_itemsize=itemsize_bytes(dtype_of((made or links[-1].group.anchor).target)),
    )


def chain_program(group: ChainGroup, tile: ChainTile, time: ChainTime, device: DeviceSpec) -> RProgram:
    """The rProgram of the chain's first product, which all others follow, with the time of all of them."""
    first, product = group.links[0], tile.products[0]
    axes = tuple("*".join(first.expr.axes[i].name for i in part) for part in _groups(first.form))
    blocks = ceil_div(group.chain.rows, tile.rows)
    shape = (tile.rows, product.columns, product.depth)
    if group.units == "matrix units":
        inner = (tile.warp_rows(0), product.columns // product.across, FRAGMENT)
    else:
        inner = (tile.rows * product.across // tile.threads, product.columns // product.across, 1)
    memory = LayerCost(
        layer="L2", footprint_bytes=float(tile.shared_bytes), traffic_bytes=group.chain.least_bytes, time_s=time.busy_s
    )
    return RProgram(
        device=device.name,
        expr_digest=first.expr.digest,
        tiles=(("L0", RTile(axes=axes, shape=inner)), ("L1", RTile(axes=axes, shape=shape))),
        vector_axis=axes[1],
        unit_count=min(device.unit_count, blocks),
        partition_count=blocks,
        epsilon=0.0,
        shrunk=False,
        prediction=Prediction(time_s=time.time_s, compute_s=time.compute_s, layers=(memory,), bound=time.bound),
    )


def _groups(form: GemmForm) -> tuple[tuple[int, ...], ...]:
    return form.rows, form.columns, form.reduction


def _read_bytes(link: ChainLink, position: int) -> float:
    """Bytes of the tensors from which the factor at ``position`` is read, or computed on the way."""
    source = link.computation.loads()[position].source
    producers = [computation for computation in link.group.prologue if computation.target.same_as(source)]
    return sum(tensor_bytes(tensor) for tensor in (producers[0].sources() if producers else [source]))


def _epilogue_bytes(link: ChainLink) -> float:
    """Bytes of the tensors that the epilogue reads beside the product."""
    own = link.group.anchor.target
    sources = [source for consumer in link.group.epilogue for source in consumer.sources() if not source.same_as(own)]
    return sum(tensor_bytes(source) for source in sources)
