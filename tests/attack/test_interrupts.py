"""Ctrl-C at many moments of the commands: exit code 130, nothing half-written, no process left behind."""

from __future__ import annotations

import time

import pytest

from tests.attack.interrupts import run_for

COMMANDS = {
    "compile": (["compile", "resnet50", "-o", "model.so", "--report", "report.html"], 30),
    "bench": (["bench", "mlp", "--rounds", "4", "--output", "result.json"], 8),
    "verify": (["verify", "mlp", "--operator", "fused_matmul_add_relu"], 8),
}


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", COMMANDS)
def test_many_moments(command: str) -> None:
    """The moments are spread evenly over a run; every other signal goes to the process group, as in a terminal."""
    arguments, count = COMMANDS[command]
    start = time.monotonic()
    whole = run_for(arguments, None)
    assert whole.code == 0, whole.output
    seconds = time.monotonic() - start
    bad = []
    for number in range(count):
        ending = run_for(arguments, seconds * (number + 0.5) / (count + 1), group=bool(number % 2))
        finished = ending.code == 0 and ending.busy_s == 0  # before its turn came, on a machine less busy than before
        print(f"{command} {number}: {ending.code}, {ending.after_s:.2f} s, busy {ending.busy_s:.2f} s", flush=True)
        if not finished and (ending.code != 130 or ending.left):
            bad.append((number, ending))
    assert not bad
