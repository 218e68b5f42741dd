"""One random chain as data: enough to make its ONNX model, to fill its inputs and to print it on a line."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..random_operators.record import Array, CaseInput

AttributeValue = int | float | str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainInput:
    """A named tensor that no node makes: an input of the model, a weight, or ``given`` numbers (a slice's ends)."""

    name: str
    content: CaseInput
    given: tuple[float, ...] | None = None

    def values(self, seed: tuple[int, int, int], draw: int) -> Array:
        """The values for ``seed`` (of the run, the case and the position); those of constants are always the same."""
        if self.given is not None:
            return np.asarray(self.given, self.content.dtype).reshape(self.content.shape)
        return self.content.draw(np.random.default_rng([*seed, 0 if self.content.constant else draw + 1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainNode:
    """One node of the model; an empty name in ``inputs`` is an optional input that is left out."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, AttributeValue], ...] = ()

    def __str__(self) -> str:
        how = ", ".join([*self.inputs, *(f"{name}={value}" for name, value in self.attributes)])
        return f"{', '.join(self.outputs)} = {self.operator}({how})"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainOutput:
    """An output of the model. ``exact``: all values up to it are whole numbers that its types hold exactly.

    ``coarsest`` is the type with the fewest digits of those that its values went through. ``finite``: none of its
    elements is infinite or NaN.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    exact: bool
    coarsest: str
    finite: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainCase:
    """``nodes`` in order of execution. ``kind`` is the producer that the chain began with.

    ``num_threads``, ``epsilon``, ``device`` and ``precision`` are as in `OperatorCase`, ``way`` as in `Settings`.
    """

    seed: int
    index: int
    kind: str
    inputs: tuple[ChainInput, ...]
    nodes: tuple[ChainNode, ...]
    outputs: tuple[ChainOutput, ...]
    num_threads: int | None = None
    epsilon: float = 0.0
    device: str = ""
    precision: str = "float32"
    way: str = "opencl"

    def data(self, draw: int) -> dict[str, Array]:
        """The values of all inputs by name; constants are the same for every ``draw``."""
        return {
            item.name: item.values((self.seed, self.index, position), draw) for position, item in enumerate(self.inputs)
        }

    @property
    def variables(self) -> tuple[ChainInput, ...]:
        """The inputs that are not constants: the model's."""
        return tuple(item for item in self.inputs if not item.content.constant)

    def __str__(self) -> str:
        given = {item.name: list(item.given) for item in self.inputs if item.given is not None}
        lines = [f"#{self.index} {self.kind}, threads {self.num_threads or 'all'}, epsilon {self.epsilon:g}"]
        lines[0] += f", for {self.device}" if self.device else ""
        for item in self.inputs:
            if item.given is None:
                kind = " constant" if item.content.constant else ""
                lines.append(f"  {item.name}: {item.content.dtype}{list(item.content.shape)}{kind}")
        for node in self.nodes:
            numbers = ", ".join(f"{name}={given[name]}" for name in node.inputs if name in given)
            lines.append(f"  {node}" + (f"  where {numbers}" if numbers else ""))
        made = ", ".join(f"{o.name}: {o.dtype}{list(o.shape)}{' exact' if o.exact else ''}" for o in self.outputs)
        return "\n".join([*lines, f"  -> {made}"])
