"""rTiles (paper §3.1): how well it pays to enlarge one, and how what it touches is stored."""

from __future__ import annotations

from math import gcd

from tvm_ext.cost.access_table import Shape
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.support.arithmetic import ceil_div


def reuse_score(model: PerfModel, level: int, tile: Shape, larger: Shape) -> float:
    """Data reuse score S = (Q(T) - Q(T')) / (F(T') - F(T)) (§3.1): bytes of traffic saved per byte of memory.

    Infinite where the traffic falls at no cost. Worked example, matmul M=N=K=64 of 4-byte items held as data tiles:
    [4, 4, 1] -> [8, 4, 1] loads 512 KiB -> 384 KiB and holds 32 -> 48 bytes: a score of 128 KiB / 16 bytes = 8192.
    """
    saved = model.traffic_bytes(level, tile) - model.traffic_bytes(level, larger)
    cost = model.footprint_bytes(level, larger) - model.footprint_bytes(level, tile)
    if cost > 0:
        return saved / cost
    return float("inf") if saved > 0 else 0.0


def bank_padding(row: int, read: int, banks: int, width: int) -> int:
    """Elements to add to rows of ``row`` elements that are read ``read`` at a time (§3.1, Figure 5b).

    ``(B*L - N % (B*L) + L*ceil(n/L)) % (B*L)`` with B banks of L elements: the padded stride is L*ceil(n/L) modulo all
    banks, so that each next row starts where the read of the one before ended. Figure 5(b): N=4, n=1, B=4, L=1 gives
    (4 - 0 + 1) % 4 = 1.
    """
    cycle = banks * width
    return (cycle - row % cycle + width * ceil_div(read, width)) % cycle


def conflict_degree(row: int, read: int, rows: int, banks: int, width: int) -> int:
    """Accesses that the busiest bank serves when ``rows`` rows, ``row`` apart, are read ``read`` elements each.

    A bank serves one word of ``width`` elements at a time; lanes that read the same word share it. The words that a
    full set of banks could serve at once is the most that is counted: [3, 4] over 4 banks, read as [3, 1], is 3.
    """
    if read == 1 and width == 1:
        return min(rows, gcd(row, banks))
    read = min(read, banks * width)  # what is longer is read in several turns
    served = max(1, banks * width // max(read, width))
    words = {(r * row + i) // width for r in range(min(rows, served)) for i in range(read)}
    load: dict[int, int] = {}
    for word in words:
        load[word % banks] = load.get(word % banks, 0) + 1
    return max(load.values(), default=1)


def storage_padding(model: PerfModel, tile: Shape, reader: Shape) -> tuple[int, ...]:
    """Padding per input of the data tile held in L1 and read by the L0 tile ``reader``; 0 where nothing conflicts."""
    layer = model.device.layers[1]
    if layer.bank_count is None or layer.bank_bytes is None:
        return (0,) * len(model.inputs)
    step = model.one_reduction_step(reader)
    padding = []
    for table in model.inputs:
        spans, reads = table.spans(tile), table.spans(step)
        width = max(1, int(layer.bank_bytes / table.itemsize_bytes))
        if len(spans) < 2 or spans[-2] == 1 or _walks_along_rows(reads, spans):
            padding.append(0)
            continue
        conflicts = conflict_degree(spans[-1], reads[-1], model.device.teu_lanes, layer.bank_count, width) > 1
        padding.append(bank_padding(spans[-1], reads[-1], layer.bank_count, width) if conflicts else 0)
    return tuple(padding)


def _walks_along_rows(reads: list[int], spans: list[int]) -> bool:
    """Whether neighbouring lanes read along the row (the row is shared out among them) rather than down a column."""
    return spans[-1] > reads[-1] and all(span == read for span, read in zip(spans[:-1], reads[:-1], strict=True))
