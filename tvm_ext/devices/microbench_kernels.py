"""The TensorIR kernels of `microbench.py`, in TVMScript; importing it takes a while, so only a measurement does."""

# TVMScript's annotations are no types.
# mypy: disable-error-code="valid-type,untyped-decorator,no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tvm.script import tirx as T  # noqa: N812 - the name that TVMScript is written with

from tvm_ext._tvm import Expr, tirx

if TYPE_CHECKING:
    from tvm_ext._tvm import PrimFunc


LOAD_CHAINS = 16
"""Independent accumulators of `load_kernel`: more than the latency of an addition times the loads of a cycle."""


def multiply_add(x: Expr, a: Expr, b: Expr) -> Expr:
    return x * a + b


FUNCTIONS: Mapping[str, Callable[[Expr, Expr, Expr], Expr]] = {
    "exp": lambda x, a, b: tirx.exp(b - x * a),
    "log": lambda x, a, b: tirx.log(x * x + b + b + a),
    "tanh": lambda x, a, b: tirx.tanh(b - x * a),
    "erf": lambda x, a, b: tirx.erf(b - x * a),
    "sigmoid": lambda x, a, b: tirx.sigmoid(b - x * a),
    "divide": lambda x, a, b: b / (x + a),
    "sqrt": lambda x, a, b: tirx.sqrt(x * a + b),
}
"""Steps of chains whose values with a = b = 1/2 stay between 1/8 and 2: none overflows, none is denormal."""


def chain_kernel(
    dtype: str,
    lanes: int,
    chains: int,
    cores: int,
    steps: int,
    value: Callable[[Expr, Expr, Expr], Expr] = multiply_add,
) -> PrimFunc:
    """Per core ``chains`` vectors x, each ``steps`` times x = value(x, a, b): x * a + b."""

    @T.prim_func(s_tir=True)
    def main(operands: T.Buffer((2, lanes), dtype), sums: T.Buffer((cores, chains * lanes), dtype)):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        for core in T.parallel(cores):
            x = T.alloc_buffer((chains * lanes,), dtype, scope="local")
            for chain in T.unroll(chains):
                for lane in T.vectorized(lanes):
                    x[chain * lanes + lane] = operands[0, lane]
            for _ in range(steps):
                for chain in T.unroll(chains):
                    for lane in T.vectorized(lanes):
                        x[chain * lanes + lane] = value(x[chain * lanes + lane], operands[0, lane], operands[1, lane])
            for chain in T.unroll(chains):
                for lane in T.vectorized(lanes):
                    sums[core, chain * lanes + lane] = x[chain * lanes + lane]

    return main


def load_kernel(lanes: int, cores: int, blocks: int, passes: int, row: int = 1, pitch: int | None = None) -> PrimFunc:
    """Per core ``passes`` sums over ``blocks`` x 16 vectors of its own part of ``data``, float32.

    They lie in rows of ``row`` vectors, ``pitch`` elements apart; None: one after the other.
    """
    width, chains, apart = LOAD_CHAINS * lanes, LOAD_CHAINS, pitch or row * lanes
    extent = blocks * chains // row * apart

    @T.prim_func(s_tir=True)
    def main(data: T.Buffer((cores, extent), "float32"), sums: T.Buffer((cores, width), "float32")):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        for core in T.parallel(cores):
            x = T.alloc_buffer((width,), "float32", scope="local")
            for chain in T.unroll(chains):
                for lane in T.vectorized(lanes):
                    x[chain * lanes + lane] = T.float32(0)
            for _ in range(passes):
                for block in range(blocks):
                    for chain in T.unroll(chains):
                        for lane in T.vectorized(lanes):
                            x[chain * lanes + lane] = (
                                x[chain * lanes + lane]
                                + data[
                                    core,
                                    (block * chains + chain) // row * apart
                                    + (block * chains + chain) % row * lanes
                                    + lane,
                                ]
                            )
            for chain in T.unroll(chains):
                for lane in T.vectorized(lanes):
                    sums[core, chain * lanes + lane] = x[chain * lanes + lane]

    return main


def clock_kernel(steps: int) -> PrimFunc:
    """``steps`` rounds of xorshift64 on one number."""

    @T.prim_func(s_tir=True)
    def main(seed: T.Buffer((1,), "uint64"), result: T.Buffer((1,), "uint64")):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        x = T.alloc_buffer((1,), "uint64", scope="local")
        x[0] = seed[0]
        for _ in range(steps):
            x[0] = x[0] ^ (x[0] << T.uint64(13))
            x[0] = x[0] ^ (x[0] >> T.uint64(7))
            x[0] = x[0] ^ (x[0] << T.uint64(17))
        result[0] = x[0]

    return main


def launch_kernel(cores: int) -> PrimFunc:
    """A parallel region in which each core writes one number to a cache line of its own."""

    @T.prim_func(s_tir=True)
    def main(result: T.Buffer((cores, 64), "float32")):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        for core in T.parallel(cores):
            result[core, 0] = T.float32(1)

    return main
