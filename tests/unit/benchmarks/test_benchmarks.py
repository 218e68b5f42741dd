"""The scripts of ``benchmarks/`` that compare with peers: what they write and print; times are not looked at."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest

from tests.unit.dummy_metaschedule import dummy_parts
from tvm_ext.bench import environment as environments
from tvm_ext.bench import models
from tvm_ext.devices.device_db import device_for_target, lookup
from tvm_ext.errors import InputError
from tvm_ext.rammer_runtime import native

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts as modules, which import each other by their bare names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def matmul(_scripts: None) -> ModuleType:
    return importlib.import_module("matmul")


@pytest.fixture
def persistent(_scripts: None) -> ModuleType:
    return importlib.import_module("persistent")


@pytest.fixture
def metaschedule(_scripts: None) -> ModuleType:
    return importlib.import_module("_metaschedule")


@pytest.fixture
def explain(_scripts: None) -> ModuleType:
    return importlib.import_module("_explain")


def _run(tmp_path: Path, script: str, *arguments: str) -> tuple[dict, str]:
    path = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--output", str(path)]
    environment = {**os.environ, "OPENBLAS_CORETYPE": "Prescott"}  # no peer may be held back by it
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding="utf-8")), done.stdout


def test_every_row_of_bolts_tables_is_there_with_its_arithmetic(persistent: ModuleType) -> None:
    rows = {row.id: row for row, _ in persistent.rows(1)}
    assert list(rows) == [*(f"T1.{i}" for i in range(1, 5)), *(f"T2.{i}" for i in range(1, 7))]
    assert rows["T1.2"].flops == 2 * 16384 * (64 * 256 + 16 * 64)
    assert rows["T1.2"].tensors == (16384 * 256, 16384 * 64, 16384 * 16)
    assert rows["T2.1"].flops == 2 * 32 * 112 * 112 * (9 * 3 * 48 + 48 * 48)
    assert rows["T2.1"].tensors == (32 * 3 * 224 * 224, 32 * 48 * 112 * 112, 32 * 48 * 112 * 112)
    floors = rows["T1.4"].floors_ms(lookup("cpu-cascade-lake"))
    assert 0 < floors["memory_fused"] < floors["memory_apart"]
    ((small, model), *_) = [item for item in persistent.rows(32) if item[0].id == "T2.6"]
    assert [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim] == [1, 64, 56, 56]
    assert small.flops == rows["T2.6"].flops / 32


@pytest.mark.slow  # as test_models_takes_several_sizes, of another script
def test_persistent_compares_one_kernel_with_two_and_with_both_peers(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    document, printed = _run(tmp_path, "persistent.py", "T1.1", "--rounds", "1", "--scale", "8")
    (row,) = document["results"]
    assert [item["name"] for item in row["timings"]] == [
        "tvm_ext", "onnxruntime", "apart", "openvino_f32", "fused again",
    ]  # fmt: skip
    errors = [item["relative_error"] for item in row["timings"] if item["name"] != "onnxruntime"]
    assert max(errors) < 1e-5
    assert row["decisions"]
    assert "T1: apart / fused" in printed


@pytest.mark.slow
def test_rammer_compares_with_launches_and_both_settings_of_both_peers(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    if not native.is_available():
        pytest.skip("this installation has no native runtime")
    document, printed = _run(tmp_path, "rammer.py", "nasbench_3", "--rounds", "1")
    (row,) = document["results"]
    names = [item["name"] for item in row["timings"]]
    assert names[:2] == ["tvm_ext", "launches"] and len(names) == 6
    assert row["best_peer"] in names[2:]
    assert max(item["relative_error"] or 0.0 for item in row["timings"]) < 1e-5
    assert "nasbench_3" in printed


def test_products_keep_k_and_n_and_are_short(matmul: ModuleType) -> None:
    products = {item.id: item for item in matmul.products()}
    table = {name: (item.M, item.K, item.N) for name, item in products.items() if item.group == "table"}
    assert table == {
        "M0": (65536, 2, 1024),
        "M1": (128, 4032, 1000),
        "M2": (128, 2048, 1000),
        "M3": (512, 1024, 4096),
        "M4": (2048, 1024, 1024),
        "M5": (512, 4096, 1024),
        "M6": (64, 30522, 1024),
    }
    assert all(item.flops <= matmul.MAXIMUM_FLOPS for item in products.values())
    assert all(item.matrix_bytes >= 64 << 20 for item in products.values() if item.group == "gemv")
    with pytest.raises(InputError, match="no product 'M7'"):
        matmul.chosen_products(["M7"])


def test_reading_reads_every_byte(matmul: ModuleType) -> None:
    size = 1 << 20
    run, sums = matmul.reader(size, 2)
    run()
    assert sums.numpy().sum() == size / 4  # of ones
    assert matmul.prepare_read(size, 2).outputs() == []


@pytest.mark.slow  # as test_models_takes_several_sizes, of another script
def test_matmul_compares_with_numpy_onnx_runtime_and_reading(tmp_path: Path, matmul: ModuleType) -> None:
    pytest.importorskip("onnxruntime", reason="it is one of the peers")
    pytest.importorskip("threadpoolctl", reason="NumPy's threads are set with it")
    document, printed = _run(tmp_path, "matmul.py", "gemv_long", "M2", "--rounds", "1", "--scale", "64")
    assert document["environment"]["placement"]
    records = document["results"]
    assert [(item["id"], item["form"]) for item in records] == [
        (name, form) for name in ("gemv_long", "M2") for form in ("variable", "constant")
    ]
    for record in records:
        peers = {"onnxruntime", "numpy"} | ({"read_bandwidth"} if record["group"] == "gemv" else set())
        assert set(record["speedup"]) == set(record["fastest_speedup"]) == peers
        errors = {item["name"]: item["relative_error"] for item in record["timings"]}
        assert errors["tvm_ext"] < 1e-5
        assert errors["numpy"] < 1e-5
        scaled = {"M2": (2, 32, 1000), "gemv_long": (1, 256, 2048)}[record["id"]]
        assert (record["M"], record["K"], record["N"]) == scaled
        assert record["numpy_blas"]
        assert "Prescott" not in record["numpy_blas"]
    assert "geometric mean" in printed


def test_metaschedule_has_operators_of_one_output(metaschedule: ModuleType) -> None:
    assert len(metaschedule.OPERATORS) == 13
    for build in metaschedule.OPERATORS.values():
        model = onnx.shape_inference.infer_shapes(build(), strict_mode=True, check_type=True)
        onnx.checker.check_model(model)
        assert len(model.graph.output) == 1
        assert all(value.dtype == np.float32 for value in models.random_inputs(model).values())


def test_metaschedule_goes_on_where_it_was_interrupted(metaschedule: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    environment = environments.current_environment()
    ran: list[str] = []

    def run(*names: str) -> list[str]:
        ran.clear()
        metaschedule.measure_each("what", environment, names, path, _measured, _no_table)
        return list(metaschedule.earlier_records(path, environment))

    def _measured(name: str, _tell: object) -> dict[str, str] | None:
        ran.append(name)
        if len(ran) > 3:
            raise KeyboardInterrupt
        return None if name == "batch_matmul" else {"id": name}

    def _no_table(_records: object) -> str:
        return ""

    assert run("depthwise", "conv_3x3") == ["conv_3x3", "depthwise"]  # the order of the table, not of the runs
    with pytest.raises(KeyboardInterrupt):
        run()
    assert ran == ["matmul_512", "matmul_1024", "batch_matmul", "conv_1x1"]
    assert run("conv_3x3") == ["matmul_512", "matmul_1024", "conv_3x3", "depthwise"] and ran == ["conv_3x3"]
    with pytest.raises(InputError, match="no operator 'conv_9x9'"):
        run("conv_9x9")


@pytest.mark.slow
def test_metaschedule_tunes_what_we_construct(tmp_path: Path) -> None:
    for package in ("onnxruntime", "cloudpickle", "psutil"):
        pytest.importorskip(package, reason="MetaSchedule or the referee needs it")
    document, printed = _run(tmp_path, "metaschedule.py", "depthwise", "--trials", "2", "--rounds", "1")
    (record,) = document["results"]
    assert 1 <= record["measured_trials"] <= 2
    errors = {item["name"]: item["relative_error"] for item in record["timings"]}
    assert max(errors["tvm_ext"], errors["metaschedule"]) < 1e-5
    assert record["to_solution_s"]["metaschedule"] > record["to_solution_s"]["tvm_ext"]
    assert "2 of 2" in printed or "1 of 2" in printed


@pytest.mark.slow  # stock TVM parses its CUDA intrinsics first, some 15 s
@pytest.mark.usefixtures("_scripts")
def test_what_a_stopped_search_left_is_compared_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """MetaSchedule was ended while it wrote a record: those before it are applied, built, and run beside ours."""
    monkeypatch.delenv("TVM_EXT_CPU", raising=False)  # what is tuned runs on this machine
    module = importlib.import_module("tuning_metaschedule")

    def search(name: str, _seconds: float, folder: Path) -> None:
        module.tune(module.OPERATORS[name](), device_for_target("llvm")[1], 3, str(folder), **dummy_parts())
        records = folder / module.FILES[1]
        records.write_text(records.read_text()[:-40])
        for file in module.FILES:
            module.drop_torn_line(folder / file)

    monkeypatch.setattr(module, "search_by_metaschedule", search)
    record = module.fight("depthwise", 2.0, 1, lambda _step: None)
    assert record["metaschedule_trials"] == 2
    assert record["median_s"]["metaschedule"] > 0
    errors = {item["name"]: item["relative_error"] for item in record["timings"]}
    assert max(errors["tvm_ext"], errors["metaschedule"]) < 1e-5
    assert module.table([record]).row_count == 2
    monkeypatch.setattr(module, "search_by_metaschedule", lambda *_: None)  # it found nothing in its time
    without = module.fight("depthwise", 1.0, 1, lambda _step: None)
    assert without["metaschedule_trials"] == 0 and set(without["speedup"]) == {"onnxruntime"}
    assert module.table([record, without]).row_count == 3


@pytest.mark.slow  # as above
@pytest.mark.usefixtures("_scripts")
def test_both_cost_models_search_and_their_kernels_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces: a run that is stopped goes on with what lacks records, and then measures nothing twice."""
    module = importlib.import_module("metaschedule_model")
    real, ran = module.tune, []

    def tune(*arguments: object, **parts: object) -> object:
        ran.append("cost_model" in parts)
        return real(*arguments, **{**parts, **dummy_parts()})

    monkeypatch.setattr(module, "tune", tune)
    output = tmp_path / "result.json"
    settings = {"seeds": 1, "many": 4, "few": 2, "rounds": 1, "folder": tmp_path / "runs", "output": output}
    module.main(["depthwise"], stop_after=1e-3, **settings)
    assert ran == [] or ran == [False]
    module.main(["depthwise"], **settings)
    assert ran == [False, True]
    (record,) = json.loads(output.read_text())["results"]
    assert record["trials"] == {"stock": 4, "ours": 2}
    assert set(record["speedup"]) == {"stock 2", "stock 4", "ours 2"} and record["speedup"]["stock 4"] == 1.0
    module.main(["depthwise"], **settings)
    assert len(ran) == 2


def test_operators_of_both_sides_meet_by_what_they_compute(explain: ModuleType) -> None:
    """A convolution of 1000 channels, which the other side fills up to 1008; a concatenation that only we run."""
    ours = [
        explain._timed("conv2d", "convolution", [(1, 512, 13, 13), (1000, 512, 1, 1), (1, 1000, 13, 13)], 1, 3e-3),
        explain._timed("concatenate", "concatenation", [(1, 4, 9), (1, 4, 9), (1, 8, 9)], 2, 1e-3),
    ]
    event = {"cat": "Node", "name": "r1_kernel_time", "dur": 2000}
    arguments = {
        "op_name": "Conv",
        "node_index": "7",
        "input_type_shape": [{"float": [1, 512, 13, 13]}, {"float": [1008, 512, 1, 1]}],
        "output_type_shape": [{"float": [1, 1008, 13, 13]}],
    }
    theirs = list(explain.their_nodes([{**event, "args": arguments}, {**event, "dur": 4000, "args": arguments}]))
    assert [(item.name, item.seconds) for item in theirs] == [("r1", pytest.approx(3e-3))]
    result = explain.match("model", ours, theirs, 5e-3, 3.5e-3)
    rows = {row.kind: (row.calls, pytest.approx(row.ours_s), pytest.approx(row.onnx_runtime_s)) for row in result.rows}
    assert rows == {
        "convolution": (1, 3e-3, 3e-3),
        "concatenation": (2, 1e-3, 0.0),
        "between operators": (1, 1e-3, 0.5e-3),
    }
    assert [row.kind for row in result.rows] == ["concatenation", "between operators", "convolution"]  # most lost first


def test_windows_and_depthwise_layers_are_told_apart(explain: ModuleType) -> None:
    x, y = (1, 32, 9, 9), (1, 32, 9, 9)
    shapes = [(32, 32, 1, 1), (32, 32, 3, 3), (32, 1, 3, 3)]
    assert len({explain._timed("c", "convolution", [x, weights, y], 1, 1.0).key for weights in shapes}) == 3


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("fused_conv2d3_add2_relu2", "convolution"),
        ("fused_matmul1_divide_add3", "matmul"),
        ("max_pool2d1", "pool"),
        ("fused_concatenate_relu2", "concatenation"),
        ("fused_less_add_where", "element-wise"),
    ],
)
def test_kernels_tell_their_kind(explain: ModuleType, kernel: str, kind: str) -> None:
    assert explain.our_kind(kernel) == kind


def test_a_model_is_explained_operator_by_operator(explain: ModuleType) -> None:
    pytest.importorskip("onnxruntime", reason="the other side")
    result = explain.explain("mlp", models.build_model("mlp"))
    products = [row for row in result.rows if row.kind == "matmul"]
    assert [row.what for row in sorted(products, key=lambda row: row.what)] == [
        "1x10 <- 1x1024",
        "1x1024 <- 1x1024",
        "1x1024 <- 1x784",
    ]
    assert all(row.ours_s > 0 and row.onnx_runtime_s > 0 for row in products)
    assert sum(row.ours_s for row in result.rows) == pytest.approx(result.ours_s)
    assert sum(row.onnx_runtime_s for row in result.rows) == pytest.approx(result.onnx_runtime_s)
    assert result.table().row_count == len(result.kinds) + 1 + len(result.rows)


def test_models_takes_several_sizes_and_writes_a_ratio_per_peer(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="one of the peers")
    document, printed = _run(tmp_path, "models.py", "mlp", "--rounds", "1", "--peer", "onnxruntime", "--explain")
    (record,) = document["results"]
    assert set(record["speedup"]) == set(record["fastest_speedup"]) == {"onnxruntime"}
    assert (record["explanation"] is None) == (record["speedup"]["onnxruntime"] >= 1)
    assert "not slower" in printed


@pytest.mark.slow  # as above
def test_exported_networks_are_timed_from_their_files(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="one of the peers")
    pytest.importorskip("openvino", reason="one of the peers")
    onnx.save(models.build_model("mlp"), str(tmp_path / "unet-torchscript-1.onnx"))  # in place of what torch writes
    arguments = ("unet", "--batch", "1", "--rounds", "1", "--keep", str(tmp_path))
    document, printed = _run(tmp_path, "exported.py", *arguments)
    (record,) = document["results"]
    assert record["model"] == "unet"
    assert set(record["speedup"]) == {"onnxruntime", "openvino_f32"}
    assert (record["explanation"] is None) == (min(record["speedup"].values()) >= 0.95)
    assert "geometric mean" in printed
