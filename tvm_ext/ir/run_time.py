"""How much a statement does when it runs, counted without running it."""

from __future__ import annotations

from tvm_ext._tvm import Analyzer, For, ForKind, Stmt, tirx
from tvm_ext.analysis.computation_exprs import count_operations

_UNKNOWN = 1 << 31  # bounds that Analyzer gives for what it knows nothing of lie beyond


def operations_of(statement: Stmt, lanes: int) -> float:
    """The operations that running ``statement`` takes, ``lanes`` elements of a vectorised loop counting as one.

    Of two branches the longer one counts, of an extent that varies its largest value, of one without a bound 1.
    Worked example: ``for i in range(10): for v in vectorized(32): a[i, v] = b[i, v] + 1`` with 16 lanes has a load and
    an addition 20 times: 40, and what the indices take.
    """
    analyzer = Analyzer()

    def visit(node: Stmt) -> float:
        if isinstance(node, tirx.SeqStmt):
            return sum(visit(part) for part in node.seq)
        if isinstance(node, tirx.IfThenElse):
            other = visit(node.else_case) if node.else_case is not None else 0.0
            return max(visit(node.then_case), other)
        if isinstance(node, For):
            bound = int(analyzer.const_int_bound(node.extent).max_value)
            times = bound if 0 <= bound < _UNKNOWN else 1
            steps = -(-times // lanes) if node.kind == ForKind.VECTORIZED else times
            return steps * visit(node.body)
        if isinstance(node, tirx.AttrStmt | tirx.While):
            return visit(node.body)
        return float(count_operations(node))

    return visit(statement)
