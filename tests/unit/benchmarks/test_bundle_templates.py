"""CUTLASS's templates in a bundle: planned, compiled and called as the runner calls them, with kernels on the CPU."""

from __future__ import annotations

import ast
import ctypes
import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.cutlass_on_cpu import HostLibrary, put_on_cpu
from tests.unit.benchmarks.gpu_scripts import FOLDER, WORKLOAD, bundled, fake_gpu, imported_scripts, run_there
from tests.unit.compilers import needs_cc, needs_nvcc
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import OptionError, UnsupportedEnvironmentError
from tvm_ext.toolchains.cutlass_toolchain import TemplateCompiler


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with imported_scripts() as modules:
        modules.templates = importlib.import_module("bundle_templates")
        modules.bundle = importlib.import_module("bundle")
        yield modules


def _convolution(scripts: SimpleNamespace, channels: int, activation: str) -> Any:
    half: dict[str, Any] = {"stride": 1, "layout": "NHWC", "dtype": "float16", "pads": (1, 1, 1, 1)}
    plain = scripts.cases.convolution("", (2, 6, 5, channels), (3, 3, channels, 16), **half)
    return scripts.lists._activated(plain, f"convolution {channels}", activation)


def _cases(scripts: SimpleNamespace) -> list[Any]:
    matmul = scripts.cases.matmul
    half: dict[str, Any] = {"stride": 1, "layout": "NHWC", "dtype": "float16"}
    first = scripts.cases.convolution("", (2, 6, 6, 8), (3, 3, 8, 32), pads=(1, 1, 1, 1), **half)
    second = scripts.cases.convolution("", (2, 6, 6, 32), (1, 1, 32, 24), pads=(0, 0, 0, 0), **half)
    products = [matmul("", 16, 32, 24, "float16"), matmul("", 16, 8, 32, "float16")]
    narrow = [matmul("", 16, 1, 4, "float16"), matmul("", 16, 4, 1, "float16")]
    return [
        matmul("halves", 24, 40, 32, "float16"),
        matmul("bias", 24, 40, 32, "float16", epilogue="bias_relu"),
        matmul("batched", 24, 40, 32, "float16", batch=3),
        matmul("integers", 24, 40, 32, "int8"),
        _convolution(scripts, 16, "softplus"),
        _convolution(scripts, 46, "hardswish"),
        scripts.lists.chained("products", products, bias=False),
        scripts.lists.chained("narrow products", narrow, bias=False),
        scripts.lists.chained("convolutions", [first, second], bias=True),
    ]


@needs_cc
def test_templates_compute_what_the_references_say(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every form in which a template reads a case's inputs, and two products one after the other."""
    put_on_cpu(monkeypatch, tmp_path)
    entries = [scripts.manifest.Entry(case=case, programs=()) for case in _cases(scripts)]
    made = scripts.templates.with_templates(entries, lookup("nvidia-a100"), 1, tmp_path, None)
    library, gpu = HostLibrary(library=ctypes.CDLL(str(tmp_path / "templates.so"))), fake_gpu(scripts)

    def called(name: str) -> Any:
        def call(arrays: Any) -> None:
            assert library.call(name, arrays) == 0

        return call

    for entry in made:
        assert set(entry.refusals) == ({"cutlass"} if entry.case.id == "narrow products" else set())
        assert scripts.manifest._entry(json.loads(json.dumps(_record(scripts, entry)))) == entry
        functions = {
            item.contender: scripts.run.stepwise(
                item, entry.case, gpu, {step.function: called(step.function) for step in item.steps}
            )
            for item in entry.programs
        }
        wanted = {
            "convolution 46": {"cutlass", "cutlass_padded"},
            "narrow products": {"cutlass_padded", "cutlass_apart"},
        }
        usual = {"cutlass", "cutlass_apart"} if entry.case.operator == "chain" else {"cutlass"}
        assert set(functions) == wanted.get(entry.case.id, usual)
        record = scripts.run.run_entry(entry, gpu, functions, compiled=False)
        assert {record[name]["state"] for name in functions} == {"ok"}, (entry.case.id, record)


def _record(scripts: SimpleNamespace, entry: Any) -> Any:
    manifest = scripts.manifest.Manifest(
        created="", commit="", device="", architectures=(), toolkit=(13, 0), versions={}, entries=(entry,), digests={}
    )
    return json.loads(scripts.manifest.to_json(manifest))["entries"][0]


@needs_cc
def test_several_templates_are_the_models_next_ones(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_cpu(monkeypatch, tmp_path)
    entry = scripts.manifest.Entry(case=scripts.cases.matmul("halves", 256, 512, 128, "float16"), programs=())
    (made,) = scripts.templates.with_templates([entry], lookup("nvidia-a100"), 3, tmp_path, None)
    assert [item.contender for item in made.programs] == ["cutlass", "cutlass_1", "cutlass_2"]
    plans = [item.plan["templates"][0] for item in made.programs]
    assert len({item["template"] for item in plans}) == 3
    assert [item["predicted_us"] for item in plans] == sorted(item["predicted_us"] for item in plans)


def test_what_has_no_template_says_why(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reasons of partitioning, and of a machine that cannot compile them; what is no product is not mentioned."""

    def missing(*_arguments: Any) -> None:
        raise UnsupportedEnvironmentError("the Python package nvidia-cutlass is not installed.", "install it")

    monkeypatch.setattr(TemplateCompiler, "compile_regions", missing)
    planes = scripts.cases.convolution("planes", (1, 8, 6, 6), (8, 8, 3, 3), stride=1, pads=(1, 1, 1, 1))
    cases = [planes, scripts.cases.matmul("halves", 24, 40, 32, "float16"), scripts.cases.elementwise("relu", (3, 5))]
    entries = [scripts.manifest.Entry(case=case, programs=(), refusals={"ours": "no"}) for case in cases]
    made = scripts.templates.with_templates(entries, lookup("nvidia-a100"), 1, tmp_path, None)
    assert "NHWC" in made[0].refusals["cutlass"]
    assert "nvidia-cutlass is not installed" in made[1].refusals["cutlass"]
    assert made[2] == entries[2]


def test_a_bundle_has_every_table_of_bolts(scripts: SimpleNamespace) -> None:
    cases = scripts.lists.standard_cases(WORKLOAD)
    assert len({case.id for case in cases}) == len(cases)
    groups = [case.group for case in cases]
    assert (groups.count("chains"), groups.count("bolt_T3"), groups.count("bolt_F9")) == (10, 6, 8)
    for table in (scripts.references._PEERS, scripts.numpy_references._REFERENCES, scripts.programs.PROGRAMS):
        assert {case.operator for case in cases} <= set(table)


def test_a_name_of_nothing_is_refused_beside_known_ones(scripts: SimpleNamespace) -> None:
    """A bundle without a case that was asked for would be noticed on the other machine."""
    listed, models = scripts.lists.standard_cases(WORKLOAD), scripts.models.MODELS
    chosen, none = scripts.bundle.choose(listed, models, ["chains", "gemm_float16_1024"])
    assert [case.id for case in chosen if case.group != "chains"] == ["gemm_float16_1024"]
    assert len(chosen) > 10 and none == {}
    assert scripts.bundle.choose(listed, models, [])[0] == listed
    with pytest.raises(OptionError, match=r"no case is called chain_1_0\."):
        scripts.bundle.choose(listed, models, ["gemm_float16_1024", "chain_1_0"])


def test_what_goes_there_needs_no_more_of_tvm_ext_than_the_bundle_has(scripts: SimpleNamespace) -> None:
    """The machine with the GPU has TVM's runtime from the bundle; of this package, what serves jobs."""
    served = importlib.import_module("bundle_runtime").JOB_MODULES
    carried = {f"tvm_ext.{name}" for name in (*served, "errors")}
    for name in scripts.bundle.SCRIPTS:
        script = ast.parse((FOLDER / name).read_text())
        assert not _of_this_package(script.body), name
        assert _of_this_package(ast.walk(script)) <= (carried if name == "run.py" else set()), name


def _of_this_package(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules of tvm_ext that statements import."""
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return {module for module in modules if module.split(".")[0] == "tvm_ext"}


@pytest.mark.slow
@needs_nvcc
@needs_cc
def test_a_bundle_with_templates_ends_at_the_launch(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """By nvcc; there a driver that computes nothing, so that what templates ask of it first fails, and is named."""
    case = scripts.cases.matmul("product", 64, 64, 32, "float16")
    folder, manifest = bundled(tmp_path, [case], templates=1)
    assert [item.contender for item in manifest.entries[0].programs] == ["ours", "dlight", "cutlass"]
    record = run_there(folder, tmp_path, tmp_path / "log")
    assert record["contenders"]["cutlass"]["state"] in ("failed", "wrong")
