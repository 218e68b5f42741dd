"""What `import tvm` alone brings, in processes of their own: registration happens once per process.

The plugin is made known to TVM by a folder of package metadata, as an installation would leave it, so that these
tests mean the same in a source checkout and in an installed one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.quick_imports import PATH_WITHOUT_TORCH
from tvm_ext import _autoload, _native

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Stands before the code under test: pretends that another tvm-ffi is installed, as the metadata says it.
OTHER_FFI = """
import importlib.metadata as metadata
true_version = metadata.version
metadata.version = lambda name: "0.0.1" if name == "apache-tvm-ffi" else true_version(name)
"""


@pytest.fixture
def installed(tmp_path: Path, run_python: Run) -> Run:
    """`run_python` where the entry point of pyproject.toml is installed."""
    project = (ROOT / "pyproject.toml").read_text()
    entry = re.search(r'^\[project\.entry-points\."tvm\.backends"\]\n(.+) = "(.+)"$', project, re.MULTILINE)
    assert entry, "pyproject.toml declares no entry point for TVM"
    metadata = tmp_path / "site" / "tvm_ext-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tvm-ext\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[tvm.backends]\n{entry[1]} = {entry[2]}\n")
    return lambda code, *flags, **environment: run_python(
        code, *flags, **{"PYTHONPATH": f"{metadata.parent}:{PATH_WITHOUT_TORCH}", **environment}
    )


def _ok(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_tvm_registers_both_pipelines_and_imports_little(installed: Run) -> None:
    code = """
import sys, tvm
assert "tvm_ext" in tvm.relax.pipeline.PIPELINE_MAP
assert "tvm_ext" in tvm.tirx.compilation_pipeline.PIPELINE_MAP
print(*sorted(name for name in sys.modules if name.startswith("tvm_ext")))
print(*sorted({"onnx", "typer", "rich", "xgboost", "matplotlib", "filelock"} & set(sys.modules)))
"""
    ours, _, heavy = _ok(installed(code)).partition("\n")
    assert ours.split() == [
        "tvm_ext", "tvm_ext._autoload", "tvm_ext._environment", "tvm_ext._native", "tvm_ext._tvm", "tvm_ext.core_count",
        "tvm_ext.errors", "tvm_ext.forks", "tvm_ext.options",
    ]  # fmt: skip
    assert heavy == ""


PIPELINES = """
assert isinstance(tvm.relax.get_pipeline("tvm_ext"), tvm.transform.Pass)
lower, host, device = tvm.tirx.get_tir_pipeline("tvm_ext")
assert isinstance(lower, tvm.transform.Pass)
"""

OLD_CODE = """
from tvm.relay.frontend import from_onnx
from tvm.contrib import graph_executor
import tvm_ext.relay as relay
assert from_onnx is relay.frontend.from_onnx is tvm.relay.frontend.from_onnx
assert graph_executor.GraphModule is relay.GraphModule
"""

OWN_RELAY = """
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp(dir=FOLDER))
(folder / "relay.py").write_text("OWN = True")
tvm.__path__.append(str(folder))
from tvm import relay
assert relay.OWN
"""

MISSING = """
assert not hasattr(tvm, "nnvm") and not hasattr(tvm, "__wrapped__")
try:
    import tvm.nnvm
except ModuleNotFoundError as error:
    assert error.name == "tvm.nnvm"
else:
    raise AssertionError("it was found")
"""

SPELLINGS = (
    "from tvm import relay",
    "import tvm.relay as relay",
    "relay = tvm.relay",
    "from tvm_ext import relay",
    "import tvm_ext.relay as relay",
    "import importlib; relay = importlib.import_module('tvm.relay')",
)
ONE_MODULE = """
import sys, tvm.relay, tvm_ext, tvm_ext.relay
from tvm import relay as a
from tvm_ext import relay as b
assert relay is a is b is tvm.relay is tvm_ext.relay is sys.modules["tvm.relay"] is sys.modules["tvm_ext.relay"]
assert (relay.__name__, relay.__spec__.name, callable(relay.build)) == ("tvm_ext.relay", "tvm_ext.relay", True)
"""

FORKS = """
import importlib, os, sys, traceback
import tvm
for number, code in enumerate({codes!r}):
    if number == 1:
        for name in ("runtime.library", "frontend", "pass_pipeline", "recorder"):
            importlib.import_module("tvm_ext." + name)
        assert not {{"tvm_ext.relay", "tvm.relay"}} & set(sys.modules)
    child = os.fork()
    if not child:
        try:
            exec(code, {{"tvm": tvm, "FOLDER": {folder!r}}})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""


def test_relay_pipelines_and_names_of_old_code_behind_import_tvm(installed: Run, tmp_path: Path) -> None:
    """Each in a fork of one process that has imported TVM, behind the first also what lies below relay, but not relay:
    that takes longer than they do.

    Every spelling of relay is one module; what TVM has by itself, or nobody has, stays as it is.
    """
    codes = [*(f"{first}\n{ONE_MODULE}" for first in SPELLINGS), PIPELINES, OLD_CODE, OWN_RELAY, MISSING]
    _ok(installed(FORKS.format(codes=codes, folder=str(tmp_path))))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("flags", [(), ("-W", "error")])
def test_a_refusal_never_breaks_import_tvm(installed: Run, flags: tuple[str, ...]) -> None:
    code = f"""
{OTHER_FFI}
import tvm
print("tvm_ext" in tvm.relax.pipeline.PIPELINE_MAP, hasattr(tvm, "relay"), hasattr(tvm, "relax"))
try:
    import tvm_ext
except Exception as error:
    print(type(error).__name__, error.remedy)
"""
    done = installed(code, *flags)
    assert _ok(done).splitlines()[0] == "False False True"
    assert _ok(done).splitlines()[1].startswith("UnsupportedEnvironmentError python -m pip install")
    assert "tvm_ext is not available" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failure_inside_registration_never_breaks_import_tvm(installed: Run, tmp_path: Path) -> None:
    code = """
import tvm_ffi.module
def fail(path): raise RuntimeError("no such symbol")
tvm_ffi.load_module = fail
import sys, pathlib
pathlib.Path.is_file = lambda self: "tvm_ext_options" in self.name or self.exists()
import tvm
print("tvm_ext" in tvm.relax.pipeline.PIPELINE_MAP, "tvm_ext" in sys.modules)
"""
    done = installed(code)
    assert _ok(done) == "True True"
    assert "PassContext options are not available: no such symbol" in done.stderr


def test_import_tvm_ext_refuses_before_tvm_is_loaded(run_python: Run) -> None:
    done = run_python(f"{OTHER_FFI}\nimport tvm_ext")
    assert done.returncode != 0
    assert "UnsupportedEnvironmentError: tvm_ext works with apache-tvm-ffi" in done.stderr
    assert "remedy: python -m pip install" in done.stderr


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("environment", [{}, {"TVM_DEVICE_BACKEND_AUTOLOAD": "0"}])
def test_import_tvm_ext_registers_by_itself(run_python: Run, environment: dict[str, str]) -> None:
    code = "import tvm_ext, tvm; print('tvm_ext' in tvm.relax.pipeline.PIPELINE_MAP); from tvm import relay"
    assert _ok(run_python(code, **environment)) == "True"


def test_runtime_only_tvm_is_left_alone(installed: Run) -> None:
    code = "import tvm, tvm_ext; print(tvm.base._RUNTIME_ONLY, tvm_ext.__version__, hasattr(tvm, 'relay'))"
    done = installed(code, "-W", "error", TVM_USE_RUNTIME_LIB="1")
    assert _ok(done) == "True 0.1.0 False"
    assert done.stderr == ""


@pytest.mark.parametrize(("given", "expected"), [(None, "usable"), ("1", "1")])
def test_tvms_pool_gets_every_usable_core_unless_the_user_says(
    installed: Run, given: str | None, expected: str
) -> None:
    code = "import tvm, tvm_ext; print(tvm.runtime.num_threads(), tvm_ext.options.usable_core_count())"
    unset = {"TVM_NUM_THREADS": given, "OMP_NUM_THREADS": None, "TVM_EXT_CHOSEN_NUM_THREADS": None}
    threads, usable = _ok(installed(code, **unset)).split()
    assert threads == (usable if expected == "usable" else expected)


def test_registering_again_does_nothing() -> None:
    from tvm_ext import _tvm

    before = dict(_tvm.relax_pipelines()), dict(_tvm.tir_pipelines())
    _autoload.register()
    assert (dict(_tvm.relax_pipelines()), dict(_tvm.tir_pipelines())) == before


def test_a_native_part_that_does_not_load_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libtvm_ext_options.so"
    broken.write_text("not a library")
    monkeypatch.setattr(_native, "_loaded", {})
    monkeypatch.setattr(_native, "library_path", lambda _name: broken)
    with pytest.warns(RuntimeWarning, match="PassContext options are not available"):
        assert not _autoload.register_config_options()


def test_a_source_checkout_has_no_native_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_native, "_loaded", {})
    monkeypatch.setattr("tvm_ext.__path__", [str(tmp_path)])
    assert _native.library_path("tvm_ext_options") is None
    assert not _autoload.register_config_options()
    assert not _native.is_loaded("tvm_ext_options")
