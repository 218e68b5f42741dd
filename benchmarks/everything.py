"""Measures everything that docs/results.md, roller.md, gpu.md and pipelining.md say, from one clean commit.

    python benchmarks/everything.py             # hours: the times first, on a machine that does nothing else
    python benchmarks/everything.py --list      # the commands; each can be run by itself
    python benchmarks/everything.py timed       # or "counted": what does not depend on the machine

Every command is a process of its own; one that fails is told at the end, and the others run all the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from _common import RESULTS, current_environment, require_clean_commit

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "timed": (
        "models.py --batch 1 --batch 8 --peer onnxruntime --peer openvino_f32 --explain",
        "exported.py",
        "winograd.py",
        "drawn.py",
        "operators.py --peer onnxruntime",
        "operators.py --peer stock_tvm --rounds 2",
        "packed_products.py",
        "matmul.py",
        "persistent.py",
        "rows.py",
        "metaschedule.py",
        "tuning.py",
        "tuning_measured.py",
        "tuning_metaschedule.py",
        "metaschedule_model.py",
        "attention.py",
        "rammer.py",
        "rammer_runtime.py",
        "threads_beside.py",
        "compile_time.py",
        "memory.py",
        "open_shapes.py",
        "open_lengths.py",
        "model_quality.py",
        "rammer_runtime.py",
        f"ablation.py --plot {DOCS / 'ablation.png'}",
    ),
    "counted": (
        "rammer_simulated.py",
        "rammer_cells.py --irregular 100",
        "construct.py --device nvidia-v100",
        f"gpu/ablation.py --plot {DOCS / 'gpu-ablation.png'}",
        "gpu/sweep.py",
        "tuning_curves.py --seeds 3",
        "gpu/models.py",
        "gpu/schedules.py",
        "gpu/pipelining.py --device nvidia-a100",
        "gpu/pipelining.py --device nvidia-h200",
        "gpu/pipelining_model.py",
        "gpu/pipelining_networks.py",
        "gpu/interpret.py",
        "gpu/chains.py",
        "gpu/heuristics.py",
        "gpu/templates.py",
    ),
}
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {"rows.py": {"TVM_NUM_THREADS": "1"}}


def run(command: str) -> int:
    """The exit status of one of `COMMANDS`."""
    script, *arguments = command.split()
    variables = {**os.environ, **ENVIRONMENT.get(script, {})}
    return subprocess.run([sys.executable, str(HERE / script), *arguments], env=variables, check=False).returncode


def main(
    groups: Annotated[list[str] | None, typer.Argument(help='"timed", "counted"; both.')] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Print the commands.")] = False,
) -> None:
    """Run every benchmark whose figures the documentation has."""
    unknown = [name for name in groups or [] if name not in COMMANDS]
    if unknown:
        raise typer.BadParameter(f"there is no group {unknown[0]!r}; the groups are {', '.join(COMMANDS)}")
    commands = [command for name in groups or COMMANDS for command in COMMANDS[name]]
    if only_list:
        print("\n".join(f"python benchmarks/{command}" for command in commands))
        return
    require_clean_commit(RESULTS / "everything", current_environment().commit)
    failed = [command for command in commands if run(command) != 0]
    print("\n".join(f"failed: {command}" for command in failed) or "all done")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
