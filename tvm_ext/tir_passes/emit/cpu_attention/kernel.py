"""An attention's kernel: from what it computes to statements, with what the model expects of them."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Buffer, Stmt
from tvm_ext.cost.attention_choices import check_attention_tiles
from tvm_ext.cost.attention_time import choose_tiles, kernel_seconds
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import PARALLEL, outer_kind
from tvm_ext.records.attention import Attention, AttentionTiles
from tvm_ext.records.rprogram import Prediction, RProgram, RTile
from tvm_ext.support.arithmetic import ceil_div

from ...expressions.vector_math import exp_below_one
from .emit import emit_attention


def attention_kernel(
    work: Attention, params: Sequence[Buffer], device: DeviceSpec, chosen: AttentionTiles | None = None
) -> tuple[Stmt, RProgram, str]:
    """The statement of the kernel, its tiles as an rProgram over queries and keys, and a note in words.

    Raises IllegalRewrite for ``chosen`` tiles that it cannot have; None are construction's own.
    """
    if chosen is not None:
        check_attention_tiles(work, chosen, device)
    tiles = chosen or choose_tiles(work, device)
    if tiles is None:
        raise IllegalRewrite(f"attention of {work}: {device.name} has no SIMD registers for queries")
    seconds = kernel_seconds(work, tiles, device)
    tasks = work.batch * ceil_div(work.queries, tiles.query_block)
    units = min(device.unit_count, tasks) if outer_kind(seconds, device) == PARALLEL else 1
    statement = emit_attention(work, tiles, params, units, lambda x: exp_below_one(x, device))
    return statement, _program(work, tiles, seconds, units, device), f"attention of {work} in {tiles}"


def _program(work: Attention, tiles: AttentionTiles, seconds: float, units: int, device: DeviceSpec) -> RProgram:
    def tile(queries: int, keys: int) -> RTile:
        return RTile(axes=("query", "key"), shape=(queries, keys))

    tasks = work.batch * ceil_div(work.queries, tiles.query_block)
    prediction = Prediction(time_s=seconds + Machine(device).launch_s, compute_s=seconds, layers=(), bound="compute")
    return RProgram(
        device=device.name,
        expr_digest="",
        tiles=(
            ("L0", tile(tiles.query_block, tiles.key_rows)),
            ("L1", tile(tiles.query_block, tiles.key_block)),
        ),
        vector_axis="query",
        unit_count=units,
        partition_count=tasks,
        epsilon=0.0,
        shrunk=False,
        prediction=prediction,
    )
