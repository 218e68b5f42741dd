"""Which kernels only copy pieces of one buffer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tvm_ext._tvm import PrimFunc
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.records.rtask_split import CopiedPiece
from tvm_ext.tir_passes.plan.copied_pieces import copied_pieces

op = relax.op


def kernel_of(shapes: list[tuple[int, ...]], make: Callable[..., relax.Expr]) -> PrimFunc:
    """The constructed kernel of a graph of one operator."""
    inputs = inputs_of(*shapes)
    plan = plan_build("llvm", BuildOptions.create(kernel_cache="off", num_threads=2))
    with plan.target:
        mod = plan.construct(module_of(inputs, make(*inputs)))
    (kernel,) = [func for _, func in mod.functions_items() if isinstance(func, PrimFunc)]
    return kernel


@pytest.mark.parametrize("rows", [1, 96])
def test_rows_of_a_split_are_pieces(rows: int) -> None:
    kernel = kernel_of([(3 * rows, 40)], lambda x: op.split(x, 3, axis=0))
    found = {piece.piece: piece.offset_bytes for piece in copied_pieces(kernel)}
    assert found == {place: (place - 1) * rows * 160 for place in range(1, len(kernel.params))}


def test_what_is_joined_is_a_piece() -> None:
    kernel = kernel_of([(2, 40), (5, 40), (1, 40)], lambda *x: op.concat(x))
    found = sorted((item.whole, item.offset_bytes) for item in copied_pieces(kernel))
    assert found == [(3, 0), (3, 320), (3, 1120)]


def test_a_slice_is_a_piece_of_what_it_is_cut_from() -> None:
    kernel = kernel_of([(6, 8, 16)], lambda x: op.strided_slice(x, axes=[0], begin=[2], end=[5]))
    assert copied_pieces(kernel) == (CopiedPiece(whole=0, piece=1, offset_bytes=1024),)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: op.split(x, 2, axis=1),
        lambda x: op.strided_slice(x, axes=[0], begin=[0], end=[6], strides=[2]),
        lambda x: op.concat([x, x], axis=1),
        lambda x: op.concat([x, op.strided_slice(x, axes=[0], begin=[0], end=[3])]),
        lambda x: op.add(x, x),
        lambda x: op.astype(x, "float16"),
        lambda x: op.permute_dims(x),
        lambda x: op.flip(x, axis=0),
    ],
    ids=["columns", "every second", "side by side", "a part", "sum", "cast", "turned", "backwards"],
)
def test_what_has_gaps_or_computes_is_none(make: Callable[..., relax.Expr]) -> None:
    assert copied_pieces(kernel_of([(6, 32)], make)) == ()
