"""``tvm-ext verify``: what it accepts, prints and returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tvm_ext.cli.app import main

Command = Callable[..., tuple[int, str, str]]

SOURCE = """
from tvm import te, tirx
from tvm.s_tir import Schedule

def _transposition(shift):
    a = te.placeholder((32, 32), "float32", "A")
    s = Schedule(te.create_prim_func([a, te.compute((32, 32), lambda i, j: a[j, i] + shift, "B")]))
    i, j = s.get_loops("B")
    s.bind(i, "blockIdx.x")
    s.bind(j, "threadIdx.x")
    return s

def good():
    return _transposition(0.0)

module = good().mod
func = module["main"]
number = 7

def racy():
    from tvm_ext.ir.build_ir import index, load, store
    from tvm_ext.ir.simt_ir import launch
    a, b = (tirx.decl_buffer([index(64)], "float32", n) for n in "AB")
    body = launch(2, 32, lambda block, t: store(b, load(a, [block * index(32) + t]), [t]))
    f = tirx.PrimFunc([a, b], body)
    return f.with_attr("global_symbol", "main").with_attr("s_tir", True)
"""


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["verify", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my_kernels.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("name", ["good", "module", "func"])
def test_a_function_of_a_file(command: Command, source: Path, name: str) -> None:
    code, out, _ = command(f"{source}:{name}", "--device", "v100")
    assert code == 0
    assert "on nvidia-v100: ok" in out and "12.5% of them asked for" in out


def test_a_wrong_kernel_gives_exit_code_1(command: Command, source: Path) -> None:
    code, out, _ = command(f"{source}:racy")
    assert code == 1 and "cross-block race of B[0]" in out
    code, out, _ = command(f"{source}:racy", "--json")
    kinds = {finding["kind"] for finding in json.loads(out)["findings"]}
    assert code == 1 and kinds == {"cross-block race", "unwritten output"}
    code, out, _ = command(f"{source}:racy", "--block", "0")
    assert code in (0, 1) and "cross-block race" not in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{}:god"], "did you mean good"),
        (["{}:number"], "is of type int, no PrimFunc"),
        (["{}"], "does not say which function"),
        (["missing.py:f"], "there is no file missing.py"),
        (["{}:good", "--device", "avx512"], "is no GPU"),
        (["{}:good", "--device", "nvidia-a10000"], "nvidia-a100"),
        (["mlp", "--operator", "nothing"], "no operator 'nothing'"),
    ],
)
def test_wrong_arguments(command: Command, source: Path, arguments: list[str], problem: str) -> None:
    code, out, errors = command(*(argument.format(source) for argument in arguments))
    assert code == 2 and problem in errors and not out


def test_an_operator_of_a_model(command: Command) -> None:
    code, out, _ = command("mlp", "--json")
    assert code == 0
    name = json.loads(out)[0]["operator"]
    code, out, _ = command("mlp", "--operator", name, "--json")
    result = json.loads(out)
    assert code == 0 and result["ok"] and result["device"] == "nvidia-a100" and result["errors"]
