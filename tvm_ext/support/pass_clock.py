"""How long each pass takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvm_ext._tvm import PassContext, PassInstrument, pass_instrument


@dataclass(slots=True)
class PassClock:
    """Self time of every pass run under it, as a PassInstrument: a pass is not charged for passes it runs inside.

    Worked example: ``Sequential`` runs for 5 s, FuseOps 3 s and FuseTIR 1.5 s inside it; it is charged 0.5 s.
    """

    on_start: Callable[[str], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[list[float]] = field(default_factory=list)  # per running pass: [start, seconds spent in inner passes]

    def before(self, name: str) -> None:
        if self.on_start is not None:
            self.on_start(name)
        self.seconds.setdefault(name, 0.0)
        self._open.append([time.perf_counter(), 0.0])

    def after(self, name: str) -> None:
        start, inner = self._open.pop()
        elapsed = time.perf_counter() - start
        self.seconds[name] += elapsed - inner
        if self._open:
            self._open[-1][1] += elapsed

    def instrument(self) -> PassInstrument:
        """A fresh PassInstrument that feeds this clock."""
        return pass_instrument(
            "PassClock", lambda _mod, info: self.before(str(info.name)), lambda _mod, info: self.after(str(info.name))
        )


def timed_context(clock: PassClock) -> contextlib.AbstractContextManager[Any]:
    """A PassContext like the current one in which ``clock`` runs.

    Where the user's context carries instruments of their own, it is left as it is and the clock stays empty: entering
    them a second time would call their ``exit_pass_ctx`` early, at which e.g. PassTimingInstrument forgets everything.
    """
    current = PassContext.current()
    if current.instruments:
        return contextlib.nullcontext(current)
    return PassContext(  # type: ignore[no-any-return]
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=list(current.disabled_pass),
        instruments=[clock.instrument()],
        config=dict(current.config),
    )
