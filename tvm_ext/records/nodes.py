"""Which nodes of a model a kernel computes, as plain records that travel in the report."""

from __future__ import annotations

from dataclasses import dataclass

NODES = "tvm_ext.nodes"
"""Attribute of an imported module: its `ImportedGraph` as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelNode:
    """A node as the model's author knows it: its name (its first output's where it has none), operator and result.

    ``shape`` is of the first output, e.g. ``"1x64x56x56"``; empty where it is not known.
    """

    name: str
    kind: str
    shape: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedNode:
    """A `ModelNode` and the nodes that it reads, by their place in the graph."""

    node: ModelNode
    reads: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedGraph:
    """The nodes of a model as imported, in the order of the graph."""

    nodes: tuple[ImportedNode, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSite:
    """One call of a kernel: the nodes that it computes, and the calls before it whose results it reads.

    Several calls may share their nodes: an LSTM is many kernels. ``shared`` counts them. Shapes and the ``dtype`` of
    the first operand are the kernel's own: a blocked layout has more axes than the model's.
    """

    function: str
    nodes: tuple[ModelNode, ...] = ()
    reads: tuple[int, ...] = ()
    operands: tuple[str, ...] = ()
    result: str = ""
    dtype: str = ""
    shared: int = 1

    @property
    def title(self) -> str:
        """The first and the last node: ``Conv conv1 … Relu relu1``; the kernel's name where nodes are not known."""
        if not self.nodes:
            return self.function
        ends = dict.fromkeys((str(self.nodes[0]), str(self.nodes[-1])))
        return " … ".join(ends) if len(self.nodes) > 2 else " + ".join(ends)
