"""Emits a chain of operators as one loop over panels, in which each operator's kernel follows the one before it.

    parallel for panel in panels:                 # rows of a product, output rows of a convolution
      pad = rows of the input, with their border
      a = 3x3 convolution of pad                  # tiles of its own rProgram, for the panel's extents
      out[panel] = 1x1 convolution of a           # a is still in L1 or L2: it never was anywhere else

Every panel has the same size, so that weights are packed in one way for all: where the panels do not divide the axis,
the last one begins earlier and writes some elements again, to the same values. Worked example, 100 rows in panels of
32: they begin at 0, 32, 64 and 68.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm_ext._tvm import Buffer, BufferStore, Expr, ForKind, Stmt, TensorLoad, structural_map, tirx
from tvm_ext.analysis.computations import dtype_of, substitute
from tvm_ext.ir.build_ir import cast_to, loop, split_index, tile_start

from ...plan.panel import Panel


def emit_panels(panel: Panel, body: Stmt, kind: ForKind) -> Stmt:
    """The loop of ``kind`` over all panels of what ``body``, which names views, does for one."""
    body = _on_originals(body, panel)

    def one(number: Expr) -> Stmt:
        at = split_index(number, panel.counts)
        table = [
            (base, tile_start(position, size, extent))
            for base, position, size, extent in zip(panel.bases, at, panel.sizes, panel.extents, strict=True)
        ]
        return substitute(body, table)

    return loop(prod(panel.counts), kind, "panel", one)


def _on_originals(body: Stmt, panel: Panel) -> Stmt:
    """``body`` with every access of a view moved to the parameter that it stands for."""
    starts = [(view, [panel.start_of(part) if part.moves else None for part in view.parts]) for view in panel.views]

    def moved(buffer: Buffer, indices: Sequence[Expr]) -> tuple[Buffer, list[Expr]] | None:
        for view, offsets in starts:
            if buffer.same_as(view.buffer):
                pairs = zip(indices, offsets, strict=True)
                return view.original, [i if o is None else i + cast_to(o, dtype_of(i)) for i, o in pairs]
        return None

    def load(item: TensorLoad) -> TensorLoad:
        found = moved(item.source, item.indices)
        return item if found is None else tirx.BufferLoad(*found)

    def store(item: BufferStore) -> BufferStore:
        found = moved(item.buffer, item.indices)
        return item if found is None else BufferStore(found[0], item.value, found[1])

    return structural_map(body, [(TensorLoad, load), (BufferStore, store)])
