"""Matrix products on vector units by a load-and-use loop: parts of kernels to be pipelined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.ir.build_ir import allocate, index, load, sequence, split_index, store
from tvm_ext.ir.simt_ir import allocate_shared, gpu_buffer, launch
from tvm_ext.support.arithmetic import ceil_div

from ..simt.good_kernels import argument, primitive_function
from .kernels import DEPTH, THREADS, TILE, Copy, clear, serial_loop, unrolled_nest, wide

SHARED = ("A_shared", "B_shared")
FRAGMENTS = ("A_fragment", "B_fragment")
QUADS = Copy(vector=4)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Product:
    """One ``C += A @ B`` of a block in tiles of 16x16, 16 steps of the reduction at a time.

    ``fragment_depth``: so many reduction steps are in registers at once (a fragment), in 16 / fragment_depth steps of a
    loop; 0 without register level. ``outside``: shared tiles are allocated before the loop, not in it. ``name`` is
    added to the names of all buffers; ``tile_dtype`` is that of the tiles where it is not the tensors'.
    """

    a: Any
    b: Any
    copy: Copy = QUADS
    fragment_depth: int = 1
    outside: bool = False
    padding: int = 0
    name: str = ""
    hints: tuple[int | None, int | None] = (None, None)
    tile_dtype: str | None = None

    @property
    def _dtype(self) -> str:
        return self.tile_dtype or str(self.a.ty.dtype)

    def reduce(self, sums: Any, corner: tuple[Expr, Expr], thread: Expr, extent: Expr | int) -> Stmt:
        """``extent`` reduction steps from ``corner`` of the output on."""
        a_tile = gpu_buffer((TILE, DEPTH), self._dtype, f"A_shared{self.name}", "shared")
        b_tile = gpu_buffer((DEPTH, TILE), self._dtype, f"B_shared{self.name}", "shared")
        tiles = [self._allocate(tile, hint) for tile, hint in zip((a_tile, b_tile), self.hints, strict=True)]

        def step(ko: Expr) -> Stmt:
            depth = ko * index(DEPTH)
            use = self.multiply_fragments if self.fragment_depth else self._use_tiles
            return sequence(
                *([] if self.outside else tiles),
                self.copy.tile(a_tile, self.a, (corner[0], depth), thread),
                self.copy.tile(b_tile, self.b, (depth, corner[1]), thread),
                use(sums, a_tile, b_tile, split_index(thread, (8, 8))),
            )

        return sequence(*(tiles if self.outside else []), serial_loop(extent, f"ko{self.name}", step))

    def _allocate(self, tile: Any, hint: int | None) -> Stmt:
        if hint is not None:
            return tirx.AllocBuffer(tile, {"tvm_ext.pipeline_stages": hint})
        return allocate_shared(tile, padding=self.padding)

    def _use_tiles(self, sums: Any, a_tile: Any, b_tile: Any, at: tuple[Expr, ...]) -> Stmt:
        def update(kk: Expr) -> Stmt:
            def element(ij: tuple[Expr, ...]) -> Stmt:
                left = wide(load(a_tile, [at[0] * index(2) + ij[0], kk]))
                right = wide(load(b_tile, [kk, at[1] * index(2) + ij[1]]))
                return store(sums, load(sums, ij) + left * right, ij)

            return unrolled_nest((2, 2), element)

        return serial_loop(DEPTH, "kk", update)

    def multiply_fragments(self, sums: Any, a_tile: Any, b_tile: Any, at: tuple[Expr, ...]) -> Stmt:
        """All products of two tiles by thread ``at`` of 8 x 8, a fragment in registers at a time."""
        width = self.fragment_depth
        a_part = gpu_buffer((2, width), self._dtype, f"A_fragment{self.name}", "local")
        b_part = gpu_buffer((width, 2), self._dtype, f"B_fragment{self.name}", "local")

        def update(ki: Expr) -> Stmt:
            first = ki * index(width)

            def read_a(ik: tuple[Expr, ...]) -> Stmt:
                return store(a_part, load(a_tile, [at[0] * index(2) + ik[0], first + ik[1]]), ik)

            def read_b(kj: tuple[Expr, ...]) -> Stmt:
                return store(b_part, load(b_tile, [first + kj[0], at[1] * index(2) + kj[1]]), kj)

            def multiply(ijk: tuple[Expr, ...]) -> Stmt:
                i, j, k = ijk
                value = wide(load(a_part, [i, k])) * wide(load(b_part, [k, j]))
                return store(sums, load(sums, [i, j]) + value, [i, j])

            return sequence(
                allocate(a_part),
                allocate(b_part),
                unrolled_nest((2, width), read_a),
                unrolled_nest((width, 2), read_b),
                unrolled_nest((2, 2, width), multiply),
            )

        return serial_loop(DEPTH // width, "ki", update)


def write_sums(c: Any, sums: Any, corner: tuple[Expr, Expr], thread: Expr) -> Stmt:
    """The thread's 2x2 sums go to the output, as far as they are inside."""
    ty, tx = split_index(thread, (8, 8))

    def element(ij: tuple[Expr, ...]) -> Stmt:
        place = [corner[0] + ty * index(2) + ij[0], corner[1] + tx * index(2) + ij[1]]
        stored = store(c, load(sums, ij), place)
        inside = [p < index(int(size)) for p, size in zip(place, c.ty.shape, strict=True) if int(size) % TILE]
        return tirx.IfThenElse(tirx.all(*inside), stored, None) if inside else stored

    return unrolled_nest((2, 2), element)


Form = Callable[[Any, Any], Product]


def matmul(
    m: int, n: int, k: int, form: Form | None = None, *, dtype: str = "float32", steps: int | None = None
) -> Any:
    """``C = A @ B`` by `Product`, one block per tile of the output; ``C = A.T @ B.T`` where copies transpose."""
    a, b, c = argument("A", m, k, dtype=dtype), argument("B", k, n, dtype=dtype), argument("C", m, n)
    product = form(a, b) if form is not None else Product(a=a, b=b)
    if product.copy.transposed:
        a, b = argument("A", k, m, dtype=dtype), argument("B", n, k, dtype=dtype)
        product = replace(product, a=a, b=b)
    grid = (ceil_div(m, TILE), ceil_div(n, TILE))
    sums = gpu_buffer((2, 2), "float32", "sums", "local")

    def kernel(block: Expr, thread: Expr) -> Stmt:
        row, column = (part * index(TILE) for part in split_index(block, grid))
        return sequence(
            allocate(sums),
            clear(sums),
            product.reduce(sums, (row, column), thread, ceil_div(k, DEPTH) if steps is None else steps),
            write_sums(c, sums, (row, column), thread),
        )

    return primitive_function([a, b, c], launch(grid[0] * grid[1], THREADS, kernel))
