"""What the commands of this folder share: options, a console, progress, and writing what came of a run.

Help texts speak of cases: operators, chains, models, networks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tvm_ext.support.files import write_atomically

Result = TypeVar("Result")

Count = Annotated[int, typer.Option(min=1, help="How many cases to draw.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same cases.")]
First = Annotated[int, typer.Option(min=0, help="Number of the first case that is drawn.")]
Jobs = Annotated[int, typer.Option(min=1, help="Worker processes.")]
LimitS = Annotated[float, typer.Option(min=1.0, help="Seconds that one case may take.")]
OneCase = Annotated[int | None, typer.Option(min=0, help="Run only this case, here, and show its kernels.")]
Devices = Annotated[list[str] | None, typer.Option(help="Rows to build for in turn; a GPU's run in OpenCL.")]
Kinds = Annotated[list[str] | None, typer.Option("--kind", help="Only cases of these kinds.")]
Results = Annotated[Path | None, typer.Option(help="Each result as it comes; what is there is not run again.")]
Precision = Annotated[str, typer.Option(help="What float32 products run in: float32 or bfloat16.")]
Way = Annotated[
    str, typer.Option(help="What runs a GPU's kernels: opencl, interpreter, or templates: CUTLASS's beside it.")
]
Tensors = Annotated[str, typer.Option(help="Type of all floats, bfloat16; as they are drawn if left out.")]
Output = Annotated[Path | None, typer.Option(help="Where to write what came of it as JSON.")]

console = Console(width=None if sys.stdout.isatty() else 160)


def watched(results: Iterable[Result], total: int, what: str) -> Iterator[Result]:
    """``results`` as they come, counted in a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        for result in results:
            progress.advance(task)
            yield result


def write(output: Path | None, document: Callable[[], str]) -> None:
    """Write ``document()`` to the file that was asked for, if one was."""
    if output is not None:
        write_atomically(output, document().encode())
        console.print(f"written: {output}")
