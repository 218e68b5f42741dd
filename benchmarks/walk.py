"""docs/walk.md: every command of README, the guide and the command line, run on small models, with what it prints.

python benchmarks/walk.py              # all, in a folder that is made for it and removed
python benchmarks/walk.py --only "tune|database"  # those that match anew; the page keeps the others

The page names the machine that most outputs come from, and behind each other output its own.
"""

from __future__ import annotations

import collections
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import typer
from _common import Environment, current_environment, progress
from onnx import helper, numpy_helper

from tvm_ext.support.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "walk.md"
SOURCES = ("README.md", "docs/guide.md")
MOST_LINES = 24  # a choice: of what one command prints
WIDTH = 190
TIMEOUT_S = 900.0

SMALLER = (("resnet50 --batch 8", "mlp --batch 8"), ("resnet50", "squeezenet"), ("--trials 200", "--trials 8"))
"""What of a documented command is smaller here: text, and what replaces it."""

NOT_RUN = (
    ("python3 dev.py", "it makes an environment first, which takes minutes"),
    ("pip install", "it installs"),
    ("pre-commit install", "it installs"),
    ("mlserver start", "it serves until it is stopped; the tests of the extra `serve` run it"),
    ("cp model.onnx examples", "it prepares that"),
)
"""Commands that the page lists alone: a part of their text, and why."""

FURTHER = (
    "tvm-ext --version",
    "tvm-ext quantize model.onnx -o bytes.onnx --calibrate data.npz --mode dynamic --rounds 2",
    "tvm-ext explain model.onnx --device cpu-epyc-zen5 --operator fused_conv2d_NCHW16c_add_relu",
    "tvm-ext verify model.onnx --device nvidia-a100",
    "tvm-ext run model.onnx --json",
    "tvm-ext database export -o all.jsonl",
    "tvm-ext database import all.jsonl",
    "tvm-ext database merge other.db all.jsonl",
    "tvm-ext database base -o model.base",
    "tvm-ext compile missing.onnx",
)
"""Commands that neither page shows: other ways, and what a mistake looks like."""

BEFORE = {
    "b.json": "tvm-ext compile model.onnx --layout NCHW --profile --report b.json -o b.so",
    "model.so": "tvm-ext compile model.onnx -o model.so",
    "build/run_model": "cmake -S examples/cpp -B build -DPython_EXECUTABLE=$(which python) && cmake --build build",
    "all.jsonl": "tvm-ext tune model.onnx --trials 8 && tvm-ext database export -o all.jsonl",
}
"""What makes a file that a command reads, where nothing has made it yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command as the page shows it, the comment behind it, and why it is not run ("": it is)."""

    command: str
    comment: str = ""
    not_run: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """What a command printed, and the day and machine of it."""

    text: str
    where: str


def documented(page: Path) -> list[Step]:
    """The commands of the page's shell blocks, each once, on small models."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return list(dict.fromkeys(map(_step, lines)))


def _step(line: str) -> Step:
    command, _, comment = line.partition("  #")
    for text, smaller in SMALLER:
        command = command.replace(text, smaller)
    reason = next((why for part, why in NOT_RUN if part in command), "")
    return Step(command=command.strip(), comment=comment.strip(), not_run=reason)


def all_steps() -> dict[str, list[Step]]:
    """Every command of the page by the title of its section."""
    sections = {f"Of {name}": documented(ROOT / name) for name in SOURCES}
    return {**sections, "Others": [_step(command) for command in FURTHER]}


def prepare(folder: Path) -> None:
    """What the commands read: a small network, once with an open batch, its inputs, and the examples."""
    onnx.save(_model(1), folder / "closed.onnx")
    onnx.save(_model("batch"), folder / "open.onnx")
    data = np.random.default_rng(0).standard_normal((4, 3, 224, 224)).astype("float32")
    np.save(folder / "data.npy", data[:1])
    np.savez(folder / "data.npz", input=data)  # of each input, samples along the first axis
    data[:1].tofile(folder / "input.bin")
    for name in ("examples", "cmake"):
        (folder / name).symlink_to(ROOT / name)
    _save_programs(folder)


def _save_programs(folder: Path) -> None:
    """Programs of PyTorch: an image's logits, by torch.export and as TorchScript, and words'."""
    import torch
    from torch import nn

    class Image(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    class Words(nn.Sequential):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids)

    torch.manual_seed(0)
    ends = nn.Conv2d(3, 16, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    image, words, pixels = (
        Image(*ends).eval(),
        Words(nn.Embedding(100, 32), nn.Linear(32, 10)),
        torch.zeros(1, 3, 224, 224),
    )
    torch.export.save(torch.export.export(image, (pixels,)), folder / "program.pt2")
    torch.jit.save(torch.jit.trace(image, pixels), folder / "script.pt")
    torch.jit.save(torch.jit.trace(words, torch.zeros(1, 128, dtype=torch.long)), folder / "words.pt")


def _model(batch: int | str) -> onnx.ModelProto:
    """Three convolutions, a mean over the image, and ten logits."""
    draw = np.random.default_rng(1)
    nodes, weights, last, channels = [], [], "input", 3
    for place, (filters, stride) in enumerate(((16, 4), (32, 2), (32, 1))):
        shape = (filters, channels, 3, 3)
        weights.append(numpy_helper.from_array((0.2 * draw.standard_normal(shape)).astype("f4"), f"w{place}"))
        weights.append(numpy_helper.from_array(draw.standard_normal(filters).astype("f4"), f"b{place}"))
        settings = {"pads": [1, 1, 1, 1], "strides": [stride, stride]}
        nodes.append(
            helper.make_node("Conv", [last, f"w{place}", f"b{place}"], [f"c{place}"], f"conv{place}", **settings)
        )
        nodes.append(helper.make_node("Relu", [f"c{place}"], [f"r{place}"], f"relu{place}"))
        last, channels = f"r{place}", filters
    weights.append(numpy_helper.from_array(draw.standard_normal((32, 10)).astype("f4"), "w"))
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["mean"], "mean"))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"], "flatten"))
    nodes.append(helper.make_node("MatMul", ["flat", "w"], ["logits"], "classify"))
    inputs = [helper.make_tensor_value_info("input", 1, [batch, 3, 224, 224])]
    outputs = [helper.make_tensor_value_info("logits", 1, [batch, 10])]
    graph = helper.make_graph(nodes, "small", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def printed_by(step: Step, folder: Path) -> str:
    """What the command prints, both streams as they come, `shortened` and without this machine's paths."""
    tools = Path(sys.executable).parent
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TVM_EXT_")},
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": str(WIDTH),
        "TVM_EXT_CACHE_DIR": str(folder / "cache"),
    }
    if not step.command.startswith("tvm-ext"):  # TVM's threads yield 300,000 times before they end, on a busy machine
        variables["TVM_THREAD_POOL_SPIN_COUNT"] = "1000"
    model = "open.onnx" if "--open" in step.command else "closed.onnx"
    shutil.copyfile(folder / model, folder / "model.onnx")
    for file, command in BEFORE.items():
        if file in step.command and file not in _written_by(step.command) and not (folder / file).exists():
            _run(command, folder, variables)
    text, code = _run(step.command, folder, variables)
    return shortened(without_paths(f"{text}(exit code {code})\n" if code else text, folder))


def _written_by(command: str) -> set[str]:
    words = command.split()
    return {word for before, word in itertools.pairwise(words) if before in ("-o", "--report", "export")}


def _run(command: str, folder: Path, variables: dict[str, str]) -> tuple[str, int]:
    done = subprocess.run(
        command, shell=True, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    return done.stdout, done.returncode


def without_paths(text: str, folder: Path) -> str:
    """``text`` with the places of this machine by what they are."""
    interpreter = Path(sys.executable).parents[1]
    places = ((folder, "."), (interpreter, ".venv"), (ROOT, "tvm_ext"), (Path.home(), "~"), (sys.base_prefix, "python"))
    for place, name in places:
        text = text.replace(str(place), name)
    return text


def shortened(text: str) -> str:
    """At most `MOST_LINES` lines, of at most `WIDTH` characters."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    lines = [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines]
    cut = len(lines) - MOST_LINES
    return "\n".join([*lines[:MOST_LINES], f"... {cut} more lines"] if cut > 1 else lines)


def here(environment: Environment) -> str:
    """The day and the machine."""
    return f"{environment.date[:10]}, {environment.device}, {environment.threads} threads"


def page_of(sections: dict[str, list[Step]], outputs: dict[str, Printed]) -> str:
    """The page's text. ``outputs`` are what commands printed."""
    shown = [step.command for steps in sections.values() for step in steps if step.command in outputs]
    (most,) = collections.Counter(outputs[command].where for command in shown).most_common(1)[:1]
    blocks = [
        "# A walk through the commands\n",
        "This page shows every command of the README, of the [guide](guide.md) and of `tvm-ext`, with what it prints.\n"
        "`python benchmarks/walk.py` makes it, on small models; long outputs are cut. Other work may have kept the\n"
        f"machine busy, so that its times are no measurements. Where nothing else is said:\n{most[0]}.\n",
    ]
    for title, steps in sections.items():
        blocks.append(f"## {title}\n")
        for step in steps:
            comment = f"  # {step.comment}" if step.comment else ""
            blocks.append(f"```sh\n{step.command}{comment}\n```\n")
            if step.not_run:
                blocks.append(f"Not run here: {step.not_run}.\n")
            elif own := outputs.get(step.command):
                blocks.append(f"```text\n{own.text or '(nothing)'}\n```\n")
                blocks += [f"{_ELSEWHERE}{own.where}.\n"] if own.where != most[0] else []
    return "\n".join(blocks)


_ELSEWHERE = "Printed elsewhere: "


def outputs_in(page: str) -> dict[str, Printed]:
    """What the commands of a page printed, by command."""
    most = re.findall(r"Where nothing else is said:\n(.*)\.\n", page)
    found = re.findall(
        rf"```sh\n([^\n]*)\n```\n\n```text\n(.*?)\n```\n(?:\n{_ELSEWHERE}([^\n]*)\.\n)?", page, re.DOTALL
    )
    return {
        command.partition("  #")[0].strip(): Printed(
            text=text, where=where or (most or ["a machine that is not known"])[0]
        )
        for command, text, where in found
    }


def ran(sections: dict[str, list[Step]], only: str | None) -> Iterator[tuple[str, str]]:
    """Runs the commands, in their order; with ``only`` those that match it, and what writes files for them."""
    with tempfile.TemporaryDirectory(prefix="walk-") as name, progress() as tell:
        folder = Path(name)
        prepare(folder)
        for step in (step for steps in sections.values() for step in steps if not step.not_run):
            if only is None or re.search(only, step.command):
                tell(step.command)
                yield step.command, printed_by(step, folder)


def main(
    only: Annotated[str | None, typer.Option(help="Run the commands that match this expression alone.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = PAGE,
) -> None:
    """Run the commands and write the page, after each of them."""
    sections, environment = all_steps(), current_environment()
    outputs = outputs_in(output.read_text(encoding="utf-8")) if output.is_file() else {}
    for command, text in ran(sections, only):
        outputs[command] = Printed(text=text, where=here(environment))
        write_atomically(output, page_of(sections, outputs).encode())


if __name__ == "__main__":
    typer.run(main)
