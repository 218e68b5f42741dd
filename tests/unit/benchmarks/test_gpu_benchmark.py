"""The bundle of ``benchmarks/gpu``: made, damaged, loaded under a driver without a device, run on a fake one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.quick_target import UNOPTIMISED
from tests.support.stub_driver import stub_events
from tests.unit.benchmarks.gpu_scripts import WORKLOAD, bundled, fake_gpu, imported_scripts, run_there, start_there
from tests.unit.compilers import needs_cc, needs_nvcc
from tvm_ext.errors import InputError


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with imported_scripts() as modules:
        yield modules


# --- cases and references -----------------------------------------------------------------------------------------
def test_cases_go_through_json(scripts: SimpleNamespace) -> None:
    cases = scripts.cases.all_cases(WORKLOAD)
    assert len({case.id for case in cases}) == len(cases) > 119
    for case in cases:
        assert scripts.cases.Case.from_record(json.loads(json.dumps(case.to_record()))) == case
        assert case.operator in scripts.programs.PROGRAMS


def test_the_workload_is_whole(scripts: SimpleNamespace) -> None:
    assert len(list(scripts.cases.roller(WORKLOAD))) == 119


@pytest.mark.parametrize("group", ["roller_conv2d", "roller_avgpool", "roller_reducemean", "fused", "conv_float16"])
def test_programs_have_the_shapes_of_their_cases(scripts: SimpleNamespace, group: str) -> None:
    cases = [case for case in scripts.cases.all_cases(WORKLOAD) if case.group == group]
    for case in cases:
        func = scripts.programs.program(case)
        expected = [(item.shape, item.dtype) for item in (*case.inputs, case.output)]
        assert [(tuple(map(int, p.ty.shape)), str(p.ty.dtype)) for p in func.params] == expected


def test_allowed_errors_follow_the_documented_table(scripts: SimpleNamespace) -> None:
    make = scripts.cases.matmul
    assert make("m", 8, 8, 4096, "float32").allowed_error == pytest.approx(8.6e-6, rel=0.02)
    assert make("m", 8, 8, 4096, "float16").allowed_error == pytest.approx(1.7e-2, rel=0.02)
    assert make("m", 8, 8, 4096, "int8").allowed_error == 0.0


def test_bolts_pairs_are_chains(scripts: SimpleNamespace) -> None:
    found = list(scripts.lists.bolt_chains(WORKLOAD.with_name("bolt_ops.csv")))
    assert [case.attributes["bias"] for case in found] == [False] * 4 + [True] * 6  # Tables 1 and 2
    for case in found:
        assert scripts.cases.Case.from_record(json.loads(json.dumps(case.to_record()))) == case
        func = scripts.programs.program(case)
        assert [tuple(map(int, p.ty.shape)) for p in func.params] == [t.shape for t in (*case.inputs, case.output)]


def _small_chains(scripts: SimpleNamespace) -> list[Any]:
    matmul, convolution = scripts.cases.matmul, scripts.cases.convolution
    half: dict[str, Any] = {"stride": 1, "layout": "NHWC", "dtype": "float16"}
    first = convolution("", (2, 6, 6, 3), (3, 3, 3, 4), pads=(1, 1, 1, 1), **half)
    second = convolution("", (2, 6, 6, 4), (1, 1, 4, 5), pads=(0, 0, 0, 0), **half)
    products = [matmul("", 9, 5, 7, "float16"), matmul("", 9, 4, 5, "float16"), matmul("", 9, 3, 4, "float16")]
    return [
        scripts.lists.chained("products", products, bias=False),
        scripts.lists.chained("convolutions", [first, second], bias=True),
    ]


def _small_cases(scripts: SimpleNamespace) -> list[Any]:
    cases = scripts.cases
    activated = [
        scripts.lists._activated(plain, name, name)
        for name in ("relu", "gelu", "hardswish", "softplus")
        for plain in (
            cases.matmul("", 5, 7, 3, "float16"),
            cases.convolution("", (1, 6, 6, 3), (3, 3, 3, 4), stride=1, pads=(1,) * 4, layout="NHWC", dtype="float16"),
        )
    ]
    return [
        *_small_chains(scripts),
        *activated,
        cases.matmul("bias", 5, 7, 3, epilogue="bias_relu"),
        cases.matmul("batched", 5, 7, 3, batch=2),
        cases.matmul("integers", 4, 8, 16, "int8"),
        cases.convolution("same", (2, 3, 9, 8), (4, 3, 3, 2), stride=2, pads=(1, 0, 1, 1)),
        cases.convolution("dilated", (1, 3, 9, 8), (4, 3, 3, 3), stride=1, pads=(2, 2, 2, 2), dilation=2),
        cases.convolution("last", (2, 6, 6, 3), (3, 3, 3, 4), stride=1, pads=(1, 1, 1, 1), layout="NHWC"),
        cases.convolution("depthwise", (1, 3, 9, 8), (3, 1, 3, 3), stride=2, pads=(1, 1, 1, 1), groups=3),
        cases.elementwise("relu", (3, 5)),
        cases.rows("softmax", "softmax", (4, 9)),
        cases.rows("norm", "layer_norm", (4, 9)),
        replace(
            cases.elementwise("pool", (1, 2, 7, 7)),
            operator="average_pool",
            output=cases.Tensor(name="y", shape=(1, 2, 4, 4), dtype="float32"),
            attributes={"kernel": [3, 3], "stride": 2, "pads": [1, 1, 1, 1]},
        ),
        replace(
            cases.elementwise("sum", (3, 4, 5)),
            operator="sum",
            output=cases.Tensor(name="y", shape=(4,), dtype="float32"),
            attributes={"axes": [0, 2]},
        ),
    ]


def test_the_program_computes_what_the_reference_says(scripts: SimpleNamespace) -> None:
    """Both are written apart from each other; the program runs here on the CPU, by stock TVM."""
    import tvm

    for case in _small_cases(scripts):
        generator = np.random.default_rng(1)
        arrays = [scripts.gpu._random(item, generator) for item in case.inputs]
        expected = scripts.numpy_references.reference(case, arrays)
        assert expected.shape == case.output.shape
        module = tvm.compile(
            tvm.IRModule({"main": scripts.programs.program(case).with_attr("global_symbol", "main")}), UNOPTIMISED
        )
        output = tvm.runtime.tensor(np.full(case.output.shape, 77, case.output.dtype))
        module(*map(tvm.runtime.tensor, arrays), output)
        difference = np.linalg.norm(output.numpy().astype("float64") - expected) / np.linalg.norm(expected)
        assert difference <= case.allowed_error, case.id


def test_what_would_take_minutes_has_no_numpy_reference(scripts: SimpleNamespace) -> None:
    case = scripts.cases.matmul("large", 4096, 4096, 4096)
    with pytest.raises(NotImplementedError, match="PyTorch"):
        scripts.numpy_references.reference(case, [])


# --- running ------------------------------------------------------------------------------------------------------
def _relu(arguments: Sequence[Any]) -> None:
    arguments[-1][:] = np.maximum(arguments[0], 0)


def _half(arguments: Sequence[Any]) -> None:
    arguments[-1].ravel()[: arguments[-1].size // 2] = np.maximum(arguments[0], 0).ravel()[: arguments[-1].size // 2]


def _fails(_arguments: Sequence[Any]) -> None:
    raise RuntimeError("too many resources requested")


def test_right_wrong_and_failing_contenders_are_told_apart(scripts: SimpleNamespace) -> None:
    case = scripts.cases.elementwise("relu", (16, 16))
    entry = scripts.manifest.Entry(case=case, programs=(), refusals={"dlight": "no rule"})
    functions = {"ours": _relu, "ours_1": _half, "ours_2": _fails}
    record = scripts.run.run_entry(entry, fake_gpu(scripts), functions, compiled=False)
    assert (record["ours"]["state"], record["ours"]["median_us"], record["ours"]["samples"]) == ("ok", 2.0, 3)
    assert (record["ours_1"]["state"], record["ours_1"]["error"]) == (
        "wrong",
        "not finite",
    )  # the poison is still there
    assert record["ours_2"]["state"] == "failed" and "too many resources" in record["ours_2"]["why"]
    assert record["dlight"] == {"state": "refused", "why": "no rule"}
    assert "median_us" not in record["ours_1"]


def _manifest(scripts: SimpleNamespace, ids: Sequence[str]) -> Any:
    entries = [scripts.manifest.Entry(case=scripts.cases.elementwise(id, (4, 4)), programs=()) for id in ids]
    return scripts.manifest.Manifest(
        created="2026-01-01T00:00:00+00:00", commit="c", device="nvidia-h200", architectures=("sm_90",),
        toolkit=(13, 0), versions={}, entries=tuple(entries), digests={"a.so": "0" * 64},
    )  # fmt: skip


def test_a_run_goes_on_where_the_last_one_ended(scripts: SimpleNamespace, tmp_path: Path) -> None:
    manifest, output = _manifest(scripts, ["a", "b", "c"]), tmp_path / "results.jsonl"
    gpu = fake_gpu(scripts)
    first = scripts.run.run_bundle(replace(manifest, entries=manifest.entries[:1]), tmp_path, gpu, output, 1)
    with output.open("a") as file:
        file.write('{"bundle": "cut off by a k')  # a kill in the middle of a line
    assert [item["id"] for item in first] == ["a"]
    with output.open("a") as file:
        file.write("\n")
    assert [item["id"] for item in scripts.run.run_bundle(manifest, tmp_path, gpu, output, 1)] == ["b", "c"]
    assert scripts.run.run_bundle(manifest, tmp_path, gpu, output, 1) == []
    other = replace(manifest, digests={"a.so": "1" * 64})
    assert len(scripts.run.run_bundle(other, tmp_path, gpu, output, 1)) == 3  # other code: nothing counts


def test_a_run_ends_when_its_time_is_over(scripts: SimpleNamespace, tmp_path: Path) -> None:
    manifest = _manifest(scripts, ["a", "b"])
    assert scripts.run.run_bundle(manifest, tmp_path, fake_gpu(scripts), tmp_path / "results.jsonl", -1) == []


def test_a_lost_device_is_noticed_after_its_case_was_kept(scripts: SimpleNamespace, tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    output = tmp_path / "results.jsonl"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        scripts.run.run_bundle(_manifest(scripts, ["a", "b"]), tmp_path, fake_gpu(scripts, broken), output, 1)
    assert scripts.run.finished(output, _manifest(scripts, ["a"]).identity) == {"a"}


# --- the bundle's checks ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("architectures", "capability", "fits"),
    [
        (("sm_80",), (8, 9), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("sm_75", "sm_90"), (9, 0), True),
    ],
)
def test_code_runs_on_its_own_architectures(
    scripts: SimpleNamespace, architectures: tuple[str, ...], capability: tuple[int, int], fits: bool
) -> None:
    manifest = replace(_manifest(scripts, []), architectures=architectures)
    if fits:
        scripts.manifest.check_device(manifest, capability, 13000)
    else:
        with pytest.raises(scripts.manifest.BundleError, match=f"--architecture sm_{capability[0]}{capability[1]}"):
            scripts.manifest.check_device(manifest, capability, 13000)


def test_a_driver_older_than_the_code_is_refused(scripts: SimpleNamespace) -> None:
    with pytest.raises(
        scripts.manifest.BundleError, match=r"supports CUDA 12\.8, the bundle was compiled by CUDA 13\.0"
    ):
        scripts.manifest.check_device(_manifest(scripts, []), (9, 0), 12080)


def _written(scripts: SimpleNamespace, folder: Path) -> Any:
    (folder / "a.so").write_bytes(b"machine code")
    manifest = replace(_manifest(scripts, ["a"]), digests={"a.so": scripts.manifest.digest(folder / "a.so")})
    (folder / "manifest.json").write_text(scripts.manifest.to_json(manifest))
    return manifest


def test_a_manifest_comes_back_as_it_was(scripts: SimpleNamespace, tmp_path: Path) -> None:
    manifest = _written(scripts, tmp_path)
    assert scripts.manifest.read_bundle(tmp_path) == manifest


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "a.so").write_bytes(b"machine c"), "a.so is damaged"),
        (lambda folder: (folder / "a.so").unlink(), "a.so is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "is no bundle"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), "is no bundle"),
        (lambda folder: (folder / "manifest.json").write_text('{"schema": 2, "entries": ['), "cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text('{"schema": 9, "entries": []}'), "schema"),
        (lambda folder: (folder / "manifest.json").write_text('{"schema": 2, "entries": [{}]}'), "cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "cannot be read"),
    ],
)
def test_a_damaged_bundle_says_what_is_wrong(
    scripts: SimpleNamespace, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    _written(scripts, tmp_path)
    damage(tmp_path)
    with pytest.raises(scripts.manifest.BundleError, match=message):
        scripts.manifest.read_bundle(tmp_path)


def test_a_damaged_bundle_ends_the_program_with_a_message(
    scripts: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripts.run.main(["--bundle", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@needs_nvcc
@needs_cc
def test_a_bundle_is_made_here_and_loads_there(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """From an operator to launches of its machine code, the other machine being a process with the stub driver."""
    case, log = scripts.cases.matmul("product", 64, 64, 32), tmp_path / "log"
    folder, manifest = bundled(tmp_path, [case])
    assert scripts.manifest.read_bundle(folder).entries[0].case == case
    assert [item.contender for item in manifest.entries[0].programs] == ["ours", "dlight"]
    uses = manifest.entries[0].programs[0].plan["uses"]
    assert uses and all(use["architecture"] == "sm_80" and use["register_count"] > 0 for use in uses)

    record = run_there(folder, tmp_path, log)
    assert {item["state"] for item in record["contenders"].values()} == {"wrong"}
    events = stub_events(log)
    launches = [event for event in events if event["event"] == "launch"]
    assert all(event["status"] == 0 for event in events) and len(launches) >= 2

    done = start_there(folder, tmp_path, log, driver=12040)
    assert done.returncode == 2 and "CUDA 12.4" in done.stderr


# --- importing ----------------------------------------------------------------------------------------------------
def _result(id: str, ours: float | None, torch: float | None, **more: Any) -> dict[str, Any]:
    def item(time: float | None) -> dict[str, Any]:
        return {"state": "wrong", "error": 1.0} if time is None else {"state": "ok", "median_us": time}

    return {
        "bundle": "b", "commit": "c", "device": "NVIDIA H200", "constructed_for": "nvidia-h200", "id": id,
        "group": "g", "contenders": {"ours": item(ours), "torch": item(torch)}, **more,
    }  # fmt: skip


def _lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_speedups_count_what_both_did_right(scripts: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(_lines(_result("a", 2.0, 8.0), _result("b", 4.0, 4.0), _result("c", None, 4.0)) + '{"cut')
    scripts.import_results.main(path, tmp_path / "results")
    (written,) = (tmp_path / "results").glob("*-gpu-nvidia-h200.json")
    summary = json.loads(written.read_text())["summary"]["g"]
    assert summary["speedup"]["torch"] == pytest.approx(2.0)  # sqrt(4 x 1)
    assert (summary["compared"]["torch"], summary["cases"], summary["states"]) == (2, 3, {"ok": 2, "wrong": 1})


def test_the_last_result_of_a_case_counts(scripts: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(_lines(_result("a", 2.0, 8.0), _result("a", 4.0, 8.0)))
    (record,) = scripts.import_results.read_results(path)
    assert scripts.import_results.best_of_ours(record) == 4.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no results"),
        ("nonsense\n" + json.dumps(_result("a", 1.0, 1.0)) + "\n", "is no JSON"),
        ('{"id": "a"}\n', "no result of run.py"),
        (_lines(_result("a", 1.0, 1.0), _result("b", 1.0, 1.0, bundle="other")), "2 bundles"),
    ],
)
def test_other_files_are_refused(scripts: SimpleNamespace, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        scripts.import_results.read_results(path)
