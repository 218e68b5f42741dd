"""Operators with an axis that is as long as it happens to be at run time, as loops over blocks of their rows.

Kernels are constructed for extents that are known. Where every computation handles each place of the open axis by
itself - a product of many rows with one matrix, whatever is element-wise, a softmax along another axis - the kernel of
a block of places serves all lengths, in a loop (`ir/step_loop.py`).

Worked example: (steps, 1, 256) times (256, 1024) is the kernel of (16, 1, 256) times (256, 1024), at steps 0, 16, ...
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Buffer, BufferStore, Expr, PrimFunc, SBlock, SBlockRealize, TensorLoad, Var, nodes_in, tirx
from tvm_ext.analysis.computations import mentions, substitute
from tvm_ext.analysis.relax_values import known_extent
from tvm_ext.ir.build_ir import INDEX_DTYPE
from tvm_ext.records.serialise import to_json
from tvm_ext.records.step_loop import STEP, STEP_LOOP, StepLoop

BLOCK = 16
"""Rows of one call. Fewer read a matrix more often, more waste more where few are given."""


def with_open_rows(func: PrimFunc) -> PrimFunc:
    """``func`` told by `STEP_LOOP` to be a loop over blocks, where it is one; itself otherwise."""
    if not isinstance(func.body, SBlockRealize):
        return func
    found = _Open.of(func)
    return func if found is None else func.with_attrs({STEP: found.step(), STEP_LOOP: to_json(found.plan())})


class _Open:
    """A function whose tensors have one axis of ``extent`` each, or none, and computes each place of it by itself."""

    def __init__(
        self, func: PrimFunc, extent: Var, axes: Sequence[tuple[Buffer, int]], outputs: Sequence[Buffer]
    ) -> None:
        self.func, self.extent, self.axes, self.outputs = func, extent, axes, outputs

    @classmethod
    def of(cls, func: PrimFunc) -> _Open | None:
        buffers = [*func.params, *func.body.block.alloc_buffers]
        if not all(hasattr(buffer.ty, "shape") for buffer in buffers):
            return None  # it takes numbers
        names = {variable for buffer in buffers for variable in nodes_in(list(buffer.ty.shape), Var)}
        if len(names) != 1:
            return None
        (extent,) = names
        axes = []
        for buffer in buffers:
            own = [axis for axis, size in enumerate(buffer.ty.shape) if mentions(size, extent)]
            if len(own) > 1 or (own and not buffer.ty.shape[own[0]].same_as(extent)):
                return None
            if own and any(size != 1 for size in map(known_extent, buffer.ty.shape[: own[0]])):
                return None  # kernels address rows across their ends, which lie elsewhere if more of them follow
            axes += [(buffer, axis) for axis in own]
        outputs = _written(func)
        made = cls(func, extent, axes, outputs)
        count = len(func.params) - len(outputs)
        is_last = all(func.params[count + position].same_as(buffer) for position, buffer in enumerate(outputs))
        all_open = all(made.axis_of(buffer) is not None for buffer in outputs)
        reads_rows = any(made.axis_of(buffer) is not None for buffer in func.params[:count])
        return made if outputs and reads_rows and is_last and all_open and made._is_row_by_row() else None

    def axis_of(self, buffer: Buffer) -> int | None:
        return next((axis for own, axis in self.axes if own.same_as(buffer)), None)

    def _is_row_by_row(self) -> bool:
        """Whether no block has two iterators of the open extent, and uses one only as that place of open tensors."""
        return all(map(self._is_block_row_by_row, nodes_in(self.func.body.block.body, SBlock)))

    def _is_block_row_by_row(self, block: SBlock) -> bool:
        open_iterators = [iterator for iterator in block.iter_vars if mentions(iterator.dom.extent, self.extent)]
        if len(open_iterators) > 1 or len(block.alloc_buffers) or len(block.match_buffers):
            return False
        if any(
            int(iterator.iter_type) != 0 or not iterator.dom.extent.same_as(self.extent) for iterator in open_iterators
        ):
            return False
        places = [iterator.var for iterator in open_iterators]
        bodies = [block.body, *([block.init] if block.init is not None else [])]
        return all(self._uses_only_places(body, places) for body in bodies)

    def _uses_only_places(self, body: tirx.Stmt, places: Sequence[Var]) -> bool:
        """Every use of ``places`` in ``body`` is the index of an open axis, every such index one of ``places``, and the
        extent itself is no number that ``body`` computes with.
        """
        accesses = [(load.source, load.indices) for load in nodes_in(body, TensorLoad)]
        accesses += [(store.buffer, store.indices) for store in nodes_in(body, BufferStore)]
        indices = [own[axis] for buffer, own in accesses if (axis := self.axis_of(buffer)) is not None]
        good = all(any(at.same_as(place) for place in places) for at in indices)
        variables = nodes_in(body, Var)
        in_places = sum(any(variable.same_as(place) for place in places) for variable in variables)
        # A walk over an access comes by the shape of its tensor, where the extent is.
        in_shapes = sum(variable.same_as(self.extent) for variable in variables)
        return good and in_places == in_shapes == len(indices)

    def plan(self) -> StepLoop:
        count = len(self.func.params) - len(self.outputs)
        inputs = [(position, self.axis_of(buffer)) for position, buffer in enumerate(self.func.params[:count])]
        sliced = [(place, axis) for place, axis in inputs if axis is not None]
        collected = [axis for axis in map(self.axis_of, self.outputs) if axis is not None]
        return StepLoop(
            input_count=count,
            sliced=tuple(place for place, _ in sliced),
            collected=tuple(range(len(self.outputs))),
            rows=BLOCK,
            axes=(*(axis for _, axis in sliced), *collected),
        )

    def step(self) -> PrimFunc:
        """The function of `BLOCK` rows."""
        size = tirx.IntImm(INDEX_DTYPE, BLOCK)
        table = [(buffer, _sized(buffer, axis, size)) for buffer, axis in self.axes]
        body = substitute(self.func.body, [*table, (self.extent, size)])
        params = [next((new for old, new in table if old.same_as(param)), param) for param in self.func.params]
        return PrimFunc(params, body, self.func.ret_type).with_attrs(dict(self.func.attrs or {}))


def _written(func: PrimFunc) -> list[Buffer]:
    """The parameters that are written, in order."""
    stored = [store.buffer for store in nodes_in(func.body, BufferStore)]
    return [param for param in func.params if any(param.same_as(buffer) for buffer in stored)]


def _sized(buffer: Buffer, axis: int, size: Expr) -> Buffer:
    shape = [*buffer.ty.shape[:axis], size, *buffer.ty.shape[axis + 1 :]]
    return tirx.decl_buffer(shape, str(buffer.ty.dtype), buffer.name, data_alignment=int(buffer.ty.data_alignment))
