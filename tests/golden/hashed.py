"""All kernels kept as hashes, and their texts in files, to be compared with those of another commit:

python -m tests.golden.hashed /tmp/before        # then change the emitter
python -m tests.golden.hashed /tmp/after && diff -r /tmp/before /tmp/after
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from tests.golden.graphs import HashedKernels, hashed_graphs
from tests.golden.single_kernels import hashed_kernels

HASHES = Path(__file__).with_name("hashes.json")


def all_hashed() -> tuple[HashedKernels, ...]:
    return (*hashed_graphs(), *hashed_kernels())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main(folder: Annotated[Path, typer.Argument(help="Where to write a file for each.")]) -> None:
    """Write the text of all kernels that are kept as hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    for kernels in all_hashed():
        (folder / f"{kernels}.tir".replace("/", "_")).write_text(kernels.emit(), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
