"""README's picture: how much faster than its peers each model of a committed result ran.

python benchmarks/picture.py benchmarks/results/2026-11-27-models-batch1-zen5.json -o docs/speed.png
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from _common import median_of

mpl.use("Agg")
import matplotlib.pyplot as plt

OURS = "tvm_ext"
TOKENS = (16, 128)


def ratios_of(record: dict[str, Any], peer: str) -> float | None:
    """The peer's median time over ours; None where it did not run."""
    medians = {item["name"]: median_of(item["samples_s"]) for item in record["timings"]}
    return medians[peer] / medians[OURS] if peer in medians else None


def label_of(record: dict[str, Any]) -> str:
    """The model's name, with the number of tokens where it reads these."""
    _, shape = record["inputs"][0]
    return f"{record['model']}, {shape[1]} tokens" if len(shape) > 1 and shape[1] in TOKENS else str(record["model"])


def main(
    results: Annotated[Path, typer.Argument(help="A file of benchmarks/models.py.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="PNG file.")],
    peer: Annotated[str, typer.Option(help="Contender to compare with.")] = "onnxruntime",
) -> None:
    """Draw a bar for each model, fastest first, and the geometric mean."""
    document = json.loads(results.read_text(encoding="utf-8"))
    found = [(ratios_of(record, peer), label_of(record)) for record in document["results"]]
    known = sorted(((ratio, name) for ratio, name in found if ratio is not None), reverse=True)
    mean = math.exp(sum(math.log(ratio) for ratio, _ in known) / len(known))
    figure, axes = plt.subplots(figsize=(8, 0.24 * len(known) + 1.1))
    ahead, behind = "#2a7f62", "#8a9099"
    axes.barh([name for _, name in known], [ratio for ratio, _ in known],
              color=[ahead if ratio >= 1 else behind for ratio, _ in known])  # fmt: skip
    for place, (ratio, _) in enumerate(known):
        axes.text(0.02, place, f"{ratio:.2f}", va="center", fontsize=8, color="white")
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.tick_params(labelsize=8)
    axes.margins(y=0.01)
    axes.set_xlabel(f"speed, {peer} = 1 (float32)", fontsize=9)
    environment = document["environment"]
    machine = f"{environment['device']}, {environment['threads']} threads, {environment['date'][:10]}"
    axes.set_title(f"geometric mean {mean:.2f}\n{machine}, commit {environment['commit'][:7]}", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    print(f"written to {output}")


if __name__ == "__main__":
    typer.run(main)
