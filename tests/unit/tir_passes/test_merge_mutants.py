"""Merged kernels with a wait less, or weaker orders: the interpreter finds each, though values may come out right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.merged_runs import MergedGraph, Runs, nobody
from tests.unit.tir_passes.test_merge_rtasks import merged, values_of
from tvm_ext.ir.device_sync import SyncOrders
from tvm_ext.records.merged import COUNTER, ENTRY_WORDS, FIRST_WAIT, LAST_WAIT, MergedKernel
from tvm_ext.support.arrays import Array
from tvm_ext.verify.simt import Concurrency


@dataclass(slots=True)
class RunsOfTable(Runs):
    """Runs with another table than the graph's."""

    table: Array | None = None

    def _called(self, name: str, given: Sequence[Array], how: Concurrency | None) -> Any:
        own = self.graph.kernels[name].table
        replaced = [self.table if self.table is not None and item.shape == (len(own),) else item for item in given]
        return Runs._called(self, name, replaced, how)


def findings(graph: MergedGraph, how: Concurrency, table: Array | None = None) -> str:
    runs = RunsOfTable(graph, table=table)
    runs(values_of(graph.mod), how)
    return "\n".join(runs.findings)


def without_waits(kernel: MergedKernel) -> Iterator[Array]:
    """The table of a kernel of one launch with an operator's waits left out, for each that has some."""
    (launch,) = kernel.launches
    table = np.array(kernel.table, np.int32)
    first = launch.blocks + 1
    entries = table[first : first + launch.entries * ENTRY_WORDS].reshape(-1, ENTRY_WORDS)
    waiting = entries[:, FIRST_WAIT] < entries[:, LAST_WAIT]
    for operator in np.unique(entries[waiting, COUNTER]).tolist():
        fewer = table.copy()
        rows = fewer[first : first + launch.entries * ENTRY_WORDS].reshape(-1, ENTRY_WORDS)
        chosen = rows[:, COUNTER] == operator
        rows[chosen, LAST_WAIT] = rows[chosen, FIRST_WAIT]
        yield fewer


@pytest.mark.parametrize("name", ["branches", pytest.param("chain", marks=pytest.mark.slow)])
def test_each_operators_waits_are_missed(name: str) -> None:
    graph = merged(name)
    (kernel,) = graph.kernels.values()
    tables = list(without_waits(kernel))
    assert tables
    for table in tables:
        assert "cross-block race" in findings(graph, Concurrency(order="random", seed=1), table)
    assert findings(graph, Concurrency(order="random", seed=1), np.array(kernel.table, np.int32)) == ""


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("orders", [SyncOrders(wait="relaxed"), SyncOrders(arrive="relaxed")], ids=str)
def test_weaker_orders_are_found(orders: SyncOrders) -> None:
    assert "cross-block race" in findings(merged("branches"), Concurrency(order="random", seed=1, orders=orders))
    tickets = merged("branches", nobody)
    assert "cross-block race" in findings(tickets, Concurrency(order="random", seed=2, orders=orders))


def test_tickets_of_streams_that_find_no_room_need_their_order() -> None:
    """One resident block that takes the last entry first waits for what no other block can run."""
    graph = merged("branches")
    (kernel,) = graph.kernels.values()
    (launch,) = kernel.launches
    table = np.array(kernel.table, np.int32)
    assert findings(graph, Concurrency(resident=1), table) == ""
    table[-launch.entries :] = table[-launch.entries :][::-1].copy()
    assert "block deadlock" in findings(graph, Concurrency(resident=1), table)
