"""examples/cpp: a compiled model in a program without Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    folder = tmp_path_factory.mktemp("cpp")
    for command in (
        ["cmake", "-S", str(EXAMPLE), "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", str(folder)],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder / "run_model"


def test_it_gives_what_python_gives(program: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    a, b = (relax.Var(name, relax.TensorType((5, 7), kind)) for name, kind in (("a", "float32"), ("b", "int32")))
    double = relax.op.add(b, b)
    mod = module_of([a, b], relax.Tuple([relax.op.exp(a), double]))
    library = relay.build(mod, "llvm", enable_rammer=False)
    library.export_library(tmp_path / "model.so")
    values = {"a": rng.standard_normal((5, 7)).astype("float32"), "b": rng.integers(-9, 9, (5, 7)).astype("int32")}
    for name, value in values.items():
        value.tofile(tmp_path / name)
    files = ["model.so", "a", "b", "exp", "double"]
    done = subprocess.run([program, *files], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("median of 11 runs: ")
    module = relay.GraphModule(library)
    module.run(**values)
    for index, name in enumerate(("exp", "double")):
        expected = module.get_output(index).numpy()
        np.testing.assert_array_equal(np.fromfile(tmp_path / name, expected.dtype).reshape(5, 7), expected)
    for arguments, said in (
        ([], "usage: "),
        (["model.so", "a"], "2 inputs and 2 outputs"),
        (["model.so", "a", "none", "exp", "double"], "none should hold 140 bytes"),
        (["none.so"], "none.so"),
    ):
        done = subprocess.run([program, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert said in done.stderr


def test_it_is_short() -> None:
    assert len((EXAMPLE / "run_model.cc").read_text(encoding="utf-8").splitlines()) <= 100
