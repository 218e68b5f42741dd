"""Decides which values are padded: a labelling of a block's operators, the cheapest that single changes lead to.

A product reads padding or does not, and writes padding or does not; a carrier does both or neither. Where a value is
needed in a form in which it is not written, something copies it: the kernel that makes it, if that can write more, a
kernel that reads a part of it, or a kernel of its own. Two searches, from no padding and from all of it, change one
label at a time as long as that saves predicted time; the cheaper end counts, for each connected part by itself. A
change asks for the costs of the operators and values that it touches alone: GhostNet is labelled in half a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, inf, prod
from typing import Literal

from tvm_ext._tvm import Call, DataflowVar, Expr, Var
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.relax_values import dtype_of, static_shape, value_bytes
from tvm_ext.byoc_cutlass.activations import is_spelling
from tvm_ext.byoc_cutlass.graph_values import RESULT
from tvm_ext.byoc_cutlass.matmul_problems import transposed_source
from tvm_ext.cost.alignment_model import AlignedProduct, copied_us, has_matrix_units, product_us, slowdown
from tvm_ext.cost.epilogue_traffic import moved_us
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.padding import PaddingSource

from .graph import REDUCTIONS, VIEWS, PaddableBlock, PaddingNode

Side = Literal["reads", "writes"]
Label = tuple[Var, Side]

WRITES_MORE = frozenset({"permute_dims", "concat", "strided_slice", "broadcast_to", "take"})
"""Beside element-wise operators, those in whose kernel stock TVM's fusion puts the padding of the result."""

READS_PARTS = frozenset({*REDUCTIONS, *VIEWS, "concat", "strided_slice", "take"})
"""Beside element-wise operators, those whose kernel reads a part of an operand where it lies."""

LEAST_SAVING_US = 1e-6
"""Less is rounding, with which the search would not end."""


class PaddingChoice:
    """The labels of one block that are worth while on ``device``; ``always``: all that there can be."""

    def __init__(self, block: PaddableBlock, device: DeviceSpec, *, always: bool = False) -> None:
        self.block, self.values, self.device = block, block.values, device
        self.products = [node for node in block.nodes.values() if node.role == "product" and self._is_served(node)]
        self.carriers = {node.variable: node for node in block.nodes.values() if node.role == "carrier"}
        self._readers = self._all_readers()
        self._product_times: dict[tuple[Var, bool, bool], float] = {}
        self.padded: set[Label] = set()
        for labels in self._groups():
            if always:
                self.padded |= set(labels)
            else:
                ends = [self._improve(set(start), labels) for start in ([], labels)]
                self.padded |= ends[0] if self._cost(labels, ends[0]) <= self._cost(labels, ends[1]) else ends[1]

    # ---- what the labels say -----------------------------------------------------------------------------------------

    def reads(self, node: PaddingNode) -> bool:
        return (node.variable, "reads" if node.role == "product" else "writes") in self.padded

    def writes(self, variable: Var) -> bool:
        return (variable, "writes") in self.padded

    @property
    def changed(self) -> bool:
        """Whether anything is written in another form than in the graph."""
        return bool(self.padded) or any(map(self.stores_transposed, self.products))

    def odd_products(self) -> list[PaddingNode]:
        """The products that padding could concern."""
        return [node for node in self.products if self.block.is_odd(node.data[0]) or self.block.is_odd(node.variable)]

    # ---- labels ------------------------------------------------------------------------------------------------------

    def _is_served(self, node: PaddingNode) -> bool:
        return has_matrix_units(self.device, dtype_of(node.data[0]))

    def _labels(self) -> list[Label]:
        if not self.products:
            return []
        labels: list[Label] = [(variable, "writes") for variable in self.carriers]
        for node in self.products:
            if self.block.is_odd(node.data[0]) and not self.reads_in_place(node) and not self._is_joined(node):
                labels.append((node.variable, "reads"))
            if self.block.is_odd(node.variable):
                labels.append((node.variable, "writes"))
        return labels

    def reads_in_place(self, node: PaddingNode) -> bool:
        """Whether the first operand is transposed and the contiguous axis of what it is made of is not its last."""
        return node.operator == "matmul" and transposed_source(node.data[0], self.values) is not None

    def _is_joined(self, node: PaddingNode) -> bool:
        """Whether the padding lies between channels, where weights that are known only at run time have no zeros."""
        weight = self.call(node).args[1]
        return len(self.block.runs_of(node.data[0])) > 1 and self.values.constant_of(weight) is None

    def _all_readers(self) -> dict[Var, list[tuple[Var, Label]]]:
        """The nodes that read each value, with the label that says in which form."""
        readers: dict[Var, list[tuple[Var, Label]]] = {}
        for node in (*self.products, *self.carriers.values()):
            side: Side = "reads" if node.role == "product" else "writes"
            for value in dict.fromkeys(node.data):
                readers.setdefault(value, []).append((node.variable, (node.variable, side)))
        return readers

    # ---- search ------------------------------------------------------------------------------------------------------

    def _groups(self) -> list[list[Label]]:
        """The labels in groups that touch no operator and no value in common, so that each can be decided by itself."""
        group_of: dict[Expr, int] = {}
        groups: dict[int, list[Label]] = {}
        for number, label in enumerate(self._labels()):
            touched = [label[0], *self._values_of(label)]
            merged = {group_of[value] for value in touched if value in group_of}
            groups[number] = [*(other for group in sorted(merged) for other in groups.pop(group)), label]
            members = (value for other in groups[number] for value in (other[0], *self._values_of(other)))
            group_of.update(dict.fromkeys(members, number))
        return list(groups.values())

    def _values_of(self, label: Label) -> list[Expr]:
        """The values that one label is about: what its operator reads, or writes; of a carrier both."""
        variable, side = label
        node = self.block.nodes[variable]
        read = node.data if node.role == "carrier" or side == "reads" else ()
        return list(dict.fromkeys((*read, *([variable] if side == "writes" else []))))

    def _improve(self, padded: set[Label], labels: Sequence[Label]) -> set[Label]:
        changed = True
        while changed:
            changed = False
            for label in labels:
                before = self._cost([label], padded)
                padded ^= {label}
                if self._cost([label], padded) < before - LEAST_SAVING_US:
                    changed = True
                else:
                    padded ^= {label}
        return padded

    def _cost(self, labels: Sequence[Label], padded: set[Label]) -> float:
        """Predicted microseconds of what the labels touch."""
        values = dict.fromkeys(each for label in labels for each in self._values_of(label))
        nodes = dict.fromkeys(variable for variable, _ in labels)
        return sum(self._value_us(each, padded) for each in values) + sum(
            self._node_us(self.block.nodes[each], padded) for each in nodes
        )

    # ---- costs of values ---------------------------------------------------------------------------------------------

    def _value_us(self, value: Expr, padded: set[Label]) -> float:
        """Copies between the two forms of a value, and the bytes that padding adds to it."""
        if not self.block.is_odd(value):
            return 0.0
        written = (value, "writes") in padded
        readers = self._readers.get(value, [])
        wanted = [label in padded for _, label in readers]
        if written:
            return moved_us(self._padding_bytes(value), self.device) + self._cut_us(value, readers, wanted)
        return self.pad_us(value) if any(wanted) else 0.0

    def _cut_us(self, value: Var, readers: list[tuple[Var, Label]], wanted: list[bool]) -> float:
        """What those cost that want a padded value without its padding: nothing if they read the part they want."""
        known = {reader for reader, _ in readers}
        plain = [reader for (reader, _), padded in zip(readers, wanted, strict=True) if not padded]
        plain_users = [*plain, *(user for user in self.values.users_of(value) if user not in known)]
        if not isinstance(value, DataflowVar):
            plain_users.append(RESULT)
        if all(self._reads_parts(user) for user in plain_users):
            return 0.0
        size = value_bytes(value)
        return copied_us(size, size, self.device)

    def _reads_parts(self, user: Var | str) -> bool:
        name = self._operator(user)
        return name is not None and (is_spelling(name) or name in READS_PARTS)

    def pad_us(self, value: Expr) -> float:
        """Writing the padded form of a value that is written without it."""
        if len(self.block.runs_of(value)) > 1:
            return inf  # padding between the channels: only what joins them writes that
        return self.copy_us(value)

    def copy_us(self, value: Expr) -> float:
        """What writing the padding behind the channels takes beside what is written anyway."""
        if self.source_of(value) == "folded":
            return moved_us(self._padding_bytes(value), self.device)
        return copied_us(value_bytes(value), value_bytes(value) + self._padding_bytes(value), self.device)

    def source_of(self, value: Expr) -> PaddingSource:
        """Who makes the padding of a value."""
        if (value, "writes") in self.padded:
            return "producer"
        name = self._operator(value)
        alone = value in self.block.inside and len(self.values.users_of(value)) == 1
        folds = name is not None and (is_spelling(name) or name in WRITES_MORE)
        return "folded" if alone and folds and not self._is_epilogue(value) else "kernel"

    def _is_epilogue(self, value: Expr) -> bool:
        """Whether element-wise operators lead back to a product, whose kernel theirs is then: it writes no more."""
        for _ in range(len(self.block.bindings)):
            if value in self.block.nodes and self.block.nodes[value].role == "product":
                return True
            operator = self.values.operator_of(self.values.bindings.get(value))
            if operator is None or not is_spelling(operator[0]):
                return False
            shape = static_shape(value)
            inner = [one for one in operator[1] if one in self.block.inside and static_shape(one) == shape]
            if not inner:
                return False
            value = inner[0]
        return False

    def _operator(self, value: Expr | str) -> str | None:
        operator = self.values.operator_of(self.values.bindings.get(value)) if isinstance(value, Var) else None
        return None if operator is None else operator[0]

    def _padding_bytes(self, value: Expr) -> float:
        real = sum(extent for extent, _ in self.block.runs_of(value))
        return value_bytes(value) / real * sum(padding for _, padding in self.block.runs_of(value))

    # ---- costs of products -------------------------------------------------------------------------------------------

    def _node_us(self, node: PaddingNode, padded: set[Label]) -> float:
        if node.role == "carrier":
            return self._depthwise_us(node, padded) if node.operator == "nn.conv2d" else 0.0
        reads, writes = ((node.variable, side) in padded for side in ("reads", "writes"))
        key = (node.variable, reads, writes)
        if key not in self._product_times:
            weights = self._weights_us(node, reads=reads, writes=writes)
            self._product_times[key] = self.product_time(node, reads=reads, writes=writes) + weights
        return self._product_times[key]

    def _depthwise_us(self, node: PaddingNode, padded: set[Label]) -> float:
        """Reading and writing its channels, in copies as wide as they allow. Its template wants 16 bytes."""
        channels = self.block.extent_of(node.data[0], padded=(node.variable, "writes") in padded)
        count = gcd(self.block.granule, channels)
        moved = moved_us(value_bytes(node.data[0]), self.device) + moved_us(value_bytes(node.variable), self.device)
        return moved * slowdown(count * itemsize_bytes(dtype_of(node.variable)))

    def product_time(self, node: PaddingNode, *, reads: bool, writes: bool) -> float:
        """Predicted microseconds of a product in one of its forms."""
        return product_us(self._aligned(node, reads=reads, writes=writes), self.device)

    def _aligned(self, node: PaddingNode, *, reads: bool, writes: bool) -> AlignedProduct:
        depth = self.block.extent_of(node.data[0], padded=reads)
        data, weight = self.call(node).args[:2]
        shape, result = static_shape(data) or (), static_shape(node.variable) or ()
        taps = prod(static_shape(weight) or ()) // (shape[-1] * result[-1]) if node.operator == "nn.conv2d" else 1
        batch = 1 if node.operator == "nn.conv2d" or len(static_shape(weight) or ()) == 2 else prod(result[:-2])
        return AlignedProduct(
            rows=prod(result[:-1]) // batch,
            columns=self.block.extent_of(node.variable, padded=writes),
            depth=depth * taps,
            batch=batch,
            input_elements=prod(shape[:-1]) * depth,
            alignments=self.alignments(node, reads=reads, writes=writes),
            itemsize_bytes=itemsize_bytes(dtype_of(data)),
            dtype=dtype_of(data),
        )

    def alignments(self, node: PaddingNode, *, reads: bool, writes: bool) -> tuple[int, int]:
        """Elements that one copy takes of either operand."""
        widest, depth = self._widest(node), self.block.extent_of(node.data[0], padded=reads)
        first = widest if self.reads_in_place(node) else gcd(widest, depth)
        if node.operator == "nn.conv2d":
            return first, gcd(widest, depth)
        second = self.call(node).args[1]
        along_depth = gcd(widest, depth)
        along_columns = gcd(widest, self.block.extent_of(node.variable, padded=writes))
        if self.values.constant_of(second) is not None:
            return first, max(along_depth, along_columns)  # `prepared` stores weights either way
        in_place = transposed_source(second, self.values) is not None and not (reads or writes)
        return first, along_depth if in_place else along_columns

    def stores_transposed(self, node: PaddingNode) -> bool:
        """Whether constant weights of a matrix product are read along K, since copies along N are narrower."""
        if not self._is_served(node) or node.operator != "matmul":
            return False
        if self.values.constant_of(self.call(node).args[1]) is None:
            return False
        depth = self.block.extent_of(node.data[0], padded=self.reads(node))
        columns = self.block.extent_of(node.variable, padded=self.writes(node.variable))
        return gcd(self._widest(node), depth) > gcd(self._widest(node), columns)

    def _weights_us(self, node: PaddingNode, *, reads: bool, writes: bool) -> float:
        """Padding the second operand: nothing for constants, which are prepared at compile time."""
        weight = self.call(node).args[1]
        if not (reads or writes) or self.values.constant_of(weight) is not None:
            return 0.0
        written = value_bytes(weight)
        for value, padded in ((node.data[0], reads), (node.variable, writes)):
            written *= self.block.extent_of(value, padded=padded) / self.block.extent_of(value, padded=False)
        return copied_us(value_bytes(weight), written, self.device)

    def _widest(self, node: PaddingNode) -> int:
        return int(VECTOR_BYTES // itemsize_bytes(dtype_of(node.data[0])))

    def call(self, node: PaddingNode) -> Call:
        return self.values.bindings[node.variable]
