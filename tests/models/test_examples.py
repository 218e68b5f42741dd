"""Every script and notebook under examples/ runs as a reader would run it, as it is where marked slow.

Notebooks run every cell of theirs; every day, one of them and all scripts run on smaller models.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.networks import bert
from tests.support.quick_imports import environment_with_torch
from tvm_ext.errors import UnsupportedEnvironmentError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
CELL_TIMEOUT_S = 600
EVERYDAY = "slow_model"
SMALLER = {
    "quickstart": {'"squeezenet"': '"mlp"'},
    "own_passes": {'"squeezenet"': '"mlp"'},
    "own_policy": {'"inception_v1"': '"mlp"', "(1, 3, 224, 224)": "(1, 784)"},
    "resnet": {'"resnet50"': '"mlp"', "rounds=5, stock_budget_s=5": "rounds=1, stock_budget_s=0.1"},
    "bert": {
        "bert.build_minilm(batch=1, sequence=128)": '"mlp"',
        "rounds=5, stock_budget_s=5": "rounds=1, stock_budget_s=0.1",
    },
    "slow_model": {'"squeezenet"': '"mlp"', ", tune=BUDGET": ""},
    "torch": {"COMPILE = True": "COMPILE = False", "CHANNELS = 64": "CHANNELS = 16"},
}
"""What an everyday run puts in the place of a notebook's models, or of a script's."""


def run_script(path: Path, tmp_path: Path, *arguments: str) -> str:
    return run_program(tmp_path, str(path), *arguments)


def run_on(path: Path, is_whole: bool, tmp_path: Path) -> str:
    """What a script prints; unless ``is_whole``, on a smaller model."""
    return run_script(path, tmp_path) if is_whole else run_program(tmp_path, "-c", _smaller(path))


def _smaller(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    for part, smaller in SMALLER[path.stem].items():
        assert part in text, f"{path.name} has no {part}"
        text = text.replace(part, smaller)
    return text


def run_program(tmp_path: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=CELL_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(path: Path, is_whole: bool, tmp_path: Path) -> str:
    """As `run_on`, on the smaller model in this process, where the script leaves nothing."""
    if is_whole:
        return run_script(path, tmp_path)
    smaller = tmp_path / path.name
    smaller.write_text(_smaller(path), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(smaller), run_name="__main__")
    return printed.getvalue()


whole_or_smaller = pytest.mark.parametrize(
    "is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["smaller", "as it is"]
)


@whole_or_smaller
def test_quickstart(is_whole: bool, tmp_path: Path) -> None:
    printed = run_here(EXAMPLES / "quickstart.py", is_whole, tmp_path)
    assert ("(1, 1000, 1, 1)" if is_whole else "(1, 10)") in printed
    assert re.search(r"\d+ kernels: .*rtile", printed), printed


@whole_or_smaller
def test_pipeline_mixes_our_passes_with_stock_ones(is_whole: bool, tmp_path: Path) -> None:
    printed = run_here(EXAMPLES / "own_passes.py", is_whole, tmp_path)
    assert re.search(r"kernels by path: \{.*'rtile': [1-9]", printed), printed
    difference = re.search(r"largest difference from relay.build: (\S+)", printed)
    assert difference is not None, printed
    assert float(difference[1]) < 1e-5


@whole_or_smaller
def test_a_policy_of_ones_own(is_whole: bool, tmp_path: Path) -> None:
    lines = run_on(EXAMPLES / "own_policy.py", is_whole, tmp_path).splitlines()
    found = [re.fullmatch(r"(\S+): (\S+) ms predicted, class (\d+)", line) for line in lines]
    assert [match and match[1] for match in found] == ["list", "wavefront", "longest-first"]
    assert len({match and match[3] for match in found}) == 1


@pytest.mark.slow
def test_repvgg(tmp_path: Path) -> None:
    arguments = ("--size", "32", "--rounds", "1", "--device", "nvidia-a100", "--variant", "ReLU")
    printed = run_script(EXAMPLES / "repvgg.py", tmp_path, *arguments)
    difference = re.search(r"relative difference (\S+)", printed)
    assert difference is not None, printed
    assert float(difference[1]) < 1e-5
    tables = re.findall(r"^ReLU +\d+ +1\.00 ", printed, re.MULTILINE)
    assert len(tables) == 2, printed
    assert "predicted for nvidia-a100" in printed and "measured on this CPU" in printed


def test_every_script_has_a_test() -> None:
    assert [path.name for path in SCRIPTS] == ["own_passes.py", "own_policy.py", "quickstart.py", "repvgg.py"]
    assert [path.name for path in NOTEBOOKS] == ["bert.ipynb", "resnet.ipynb", "slow_model.ipynb", "torch.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    """Outputs carry machine paths and numbers that nobody can reproduce; readers make their own."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[] for _ in cells]
    assert {cell["execution_count"] for cell in cells} == {None}


def _with_smaller_models(notebook: Any, stem: str) -> None:
    for text, smaller in SMALLER[stem].items():
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source]
        assert cells, f"{stem}.ipynb has no {text}"
        for cell in cells:
            cell.source = cell.source.replace(text, smaller)


@whole_or_smaller
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem == EVERYDAY else pytest.mark.slow) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_notebook_runs(path: Path, is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nbclient", "ipykernel", "matplotlib", "onnxruntime"):
        pytest.importorskip(package, reason=f"executing notebooks needs {package}")
    if path.stem == "bert":
        _require_minilm()
    if path.stem == "torch":
        pytest.importorskip("torch", reason="it exports a module of PyTorch")
        monkeypatch.setenv("PYTHONPATH", environment_with_torch()["PYTHONPATH"])
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    if is_whole:
        monkeypatch.delenv("TVM_EXT_CPU", raising=False)  # the one that stands for this machine: tuning measures
    else:
        _with_smaller_models(notebook, path.stem)
    folder = EXAMPLES if is_whole else tmp_path
    before = set(folder.iterdir())
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": str(folder)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert "relative error" in "".join(output.get("text", "") for output in outputs)
    plots = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(plots) >= 3
    assert set(folder.iterdir()) == before  # it leaves nothing behind


def _require_minilm() -> None:
    try:
        bert.minilm_directory()
    except UnsupportedEnvironmentError as error:
        pytest.skip(str(error))
