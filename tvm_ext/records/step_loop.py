"""A TensorIR function that is a loop: which tensors hold all steps, and which carry a state from step to step."""

from __future__ import annotations

from dataclasses import dataclass

STEP_LOOP = "tvm_ext.step_loop"
"""PrimFunc attribute: the `StepLoop` that the function runs, as JSON."""
STEP = "tvm_ext.step"
"""PrimFunc attribute beside `STEP_LOOP`: the PrimFunc of one step, unscheduled, from which kernels are constructed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLoop:
    """How the function of one step is called as many times as the first axis of a tensor is long.

    The loop's parameters are the step's inputs, then ``collected``, then the last states of ``carried``. Inputs and
    results count from 0, each by themselves.

    Worked example: the step of an LSTM takes inputs, hidden, cell, recurrent and gives hidden, cell. With ``sliced``
    (0,), ``carried`` ((1, 0), (2, 1)) and ``collected`` (0,), the loop takes inputs (steps, batch, columns), the
    initial hidden and cell states and recurrent, and gives the hidden states of all steps (steps, batch, units), the
    last hidden state and the last cell state.

    * ``input_count``: parameters of the step that are inputs; those behind them are its results.
    * ``sliced``: inputs of which every step has its own part along a first axis of the loop's parameter.
    * ``carried``: (input, result): what one step gives, the next one takes; the loop's parameter is what the first one
      takes.
    * ``collected``: results that the loop keeps of every step, along a first axis.
    * ``is_reverse``: whether the last place of that axis is the first step.
    * ``steps``: how many steps there are, where that is known before.
    * ``rows``: places along that axis that one call of the step takes, where the step has an axis of so many itself;
      None: one, and the step does not have the axis.
    * ``axes``: with ``rows``, which axis it is: of each of ``sliced``, then of each of ``collected``.
    """

    input_count: int
    sliced: tuple[int, ...]
    carried: tuple[tuple[int, int], ...] = ()
    collected: tuple[int, ...] = ()
    is_reverse: bool = False
    steps: int | None = None
    rows: int | None = None
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.sliced and self.input_count > max(self.sliced)
        assert not {item for item, _ in self.carried} & set(self.sliced)
        if self.rows is not None:
            assert self.rows >= 1 and not self.carried and not self.is_reverse and self.steps is None
            assert len(self.axes) == len(self.sliced) + len(self.collected)
