"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from rich.progress import Progress

import tvm_ext
from tvm_ext import relay
from tvm_ext.cli import common, doctor
from tvm_ext.cli.app import main
from tvm_ext.cli.common import Steps, parse_shapes
from tvm_ext.cli.doctor import HealthCheck
from tvm_ext.errors import InputError, OptionError
from tvm_ext.records.exchange_plan import ExchangePlan
from tvm_ext.records.serialise import from_json
from tvm_ext.reports.report import BuildReport

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """``command("run", "mlp")`` gives (exit code, output, errors)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "mlp.so"
    with pytest.raises(SystemExit, match="0"):
        main(["compile", "mlp", "-o", str(path), "--report", str(path.with_suffix(".html")), "--json"])
    return path


def test_compile_writes_library_and_report(library_path: Path) -> None:
    library = relay.load(library_path)
    page = library_path.with_suffix(".html").read_text()
    assert [spec.name for spec in library.inputs] == ["x"]
    assert all(operator.name in page for operator in library.report.operators)


def test_compile_prints_the_report(command: Command, tmp_path: Path) -> None:
    code, out, err = command("compile", "mlp", "-o", tmp_path / "m.so", "--profile")
    assert (code, err) == (0, "")
    assert "kernels: " in out
    assert f"wrote {tmp_path / 'm.so'}" in out


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["devices", "abacus"], 2), (["--bad"], 2)])
def test_a_command_of_the_shell_does_not_wait_for_threads(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TVM's own yield 300,000 times before they end, which takes minutes where other processes want the cores."""
    left: list[int] = []
    monkeypatch.setattr(common, "leave_at_once", left.append)  # which ends the process, and all tests
    monkeypatch.setattr(sys, "argv", ["tvm-ext", *words])
    with pytest.raises(SystemExit):
        main()
    assert left == [code]


def test_the_versions(command: Command) -> None:
    code, out, err = command("--version")
    assert (code, err) == (0, "")
    assert out.startswith(f"tvm_ext {tvm_ext.__version__}\napache-tvm 0.27")


def test_options_of_a_build_reach_it(command: Command, tmp_path: Path) -> None:
    chosen = ("--layout", "NCHW", "--threads", 1, "--candidates", 3, "--pipelining", "off")
    code, out, _ = command("compile", "mlp", "-o", tmp_path / "m.so", "--json", *chosen)
    options = dict(BuildReport.from_json(out).options)
    assert code == 0
    assert (options["layout"], options["num_threads"], options["candidates"]) == ("NCHW", "1", "3")
    assert options["enable_pipelining"] == "False"
    for name in ("compile", "bench", "explain"):
        code, _, err = command(name, "mlp", "--layout", "rows")
        assert code == 2
        assert "NCHWc" in err, name


@pytest.mark.parametrize("name", ["compile", "bench", "explain", "verify"])
def test_commands_that_build_take_the_options_of_builds(command: Command, name: str) -> None:
    _, out, _ = command(name, "--help")
    names = {"--candidates", "--pipelining"} | ({"--layout", "--threads", "--precision"} if name != "verify" else set())
    assert all(option in out for option in names)


def test_the_bar_moves_with_passes_and_kernels() -> None:
    """Never back, by passes to the middle of a step, by kernels to its end."""
    progress = Progress()
    steps = Steps(progress, 2)
    seen = []
    steps.begin("importing")
    steps.begin("building")
    for text in ("FuseOps", "tvm_ext.PackConstants", "kernel 1 of 2: a", "kernel 2 of 2: b"):
        steps.detail(text)
        seen.append(progress.tasks[0].completed)
    assert seen == sorted(seen)
    assert 1 < seen[1] < 1.5
    assert seen[2:] == [1.75, 2.0]


def test_compile_prints_json_for_scripts(command: Command, tmp_path: Path) -> None:
    code, out, err = command("compile", "mlp", "-o", tmp_path / "m.so", "--no-roller", "--json")
    report = BuildReport.from_json(out)
    assert (code, err) == (0, "")
    assert set(report.path_counts()) == {"stock"}


def test_run_with_files_in_and_out(command: Command, library_path: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(3).standard_normal((1, 784)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    code, out, _ = command("run", library_path, "--input", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "y.npz")
    module = relay.GraphModule(relay.load(library_path))
    module.run(x=x)
    assert code == 0
    with np.load(tmp_path / "y.npz") as results:
        np.testing.assert_array_equal(results["logits"], module.get_output(0).numpy())
    assert out.startswith("logits: 1x10 float32, min ")


def test_run_with_random_inputs_is_reproducible(command: Command, library_path: Path) -> None:
    results = [command("run", library_path, "--seed", seed, "--json")[1] for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]
    assert json.loads(results[0])["random_inputs"] == ["x"]


def test_explain_lists_the_operators(command: Command) -> None:
    code, out, _ = command("explain", "mlp", "--json")
    operators = json.loads(out)
    assert code == 0
    assert sum(item["calls"] for item in operators) == 3


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("device", ["cpu-zen3", "nvidia-v100"])
def test_explain_shows_the_construction(command: Command, device: str) -> None:
    name = json.loads(command("explain", "mlp", "--json")[1])[0]["operator"]
    code, out, _ = command("explain", "mlp", "--operator", name, "--device", device)
    assert code == 0
    for expected in ("chosen rProgram", "bound by", "footprint", "reuse score", "why the alternatives lost"):
        assert expected in out
    record = json.loads(command("explain", "mlp", "--operator", name, "--device", device, "--json")[1])
    programs = record["anchors"][0]["construction"]["programs"]
    times = [program["prediction"]["time_s"] for program in programs]
    assert record["device"] == device
    # On a CPU other terms rank the programs as well, and break near ties.
    assert times == (sorted(times) if device == "nvidia-v100" else sorted(times, key=lambda time_s: round(time_s, 6)))


def test_compile_for_an_ipu_writes_a_folder_for_each_operator(command: Command, tmp_path: Path) -> None:
    """The product has code; the one in float64 is refused by its tensor's type, and its folder is not made."""
    product = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    double = onnx.helper.make_node("Cast", ["z"], ["d"], to=onnx.TensorProto.DOUBLE)
    given = [("x", (5, 33)), ("w", (33, 17)), ("z", (5, 17))]
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in given]
    outputs = [
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (5, 17)),
        onnx.helper.make_tensor_value_info("d", onnx.TensorProto.DOUBLE, (5, 17)),
    ]
    model = onnx.helper.make_model(onnx.helper.make_graph([product, double], "two", inputs, outputs))
    onnx.save(model, tmp_path / "two.onnx")
    arguments = ("compile", tmp_path / "two.onnx", "--target", "graphcore-ipu", "-o", tmp_path / "two.ipu")
    code, out, _ = command(*arguments, "--json")
    assert code == 0
    made, refused = sorted(json.loads(out), key=lambda operator: "refused" in operator)
    assert made["supersteps"] == 1
    assert made["synchronise_s"] == pytest.approx(500e-9)
    assert "float64: vertices have float32" in refused["refused"]
    folders = [folder.name for folder in (tmp_path / "two.ipu").iterdir()]
    assert folders == [made["operator"]]
    plan = from_json(ExchangePlan, (tmp_path / "two.ipu" / made["operator"] / "plan.json").read_text())
    assert f"class {plan.vertices[0].name} " in (tmp_path / "two.ipu" / made["operator"] / "vertices.cpp").read_text()
    code, _, err = command(*arguments, "--profile")
    assert code == 2
    assert "--target graphcore-ipu goes without" in err


def test_explain_names_the_nearest_operators(command: Command) -> None:
    code, out, err = command("explain", "mlp", "--operator", "fused_matmul_ad")
    assert (code, out) == (2, "")
    assert "did you mean fused_matmul" in err


def test_devices(command: Command) -> None:
    code, out, _ = command("devices")
    assert code == 0
    assert "nvidia-v100" in out
    code, out, _ = command("devices", "V100")
    assert "shared memory" in out
    assert "49,152" in out
    assert json.loads(command("devices", "v100", "--json")[1])["unit_count"] == 80
    assert {"cpu", "nvidia-h200"} <= {item["name"] for item in json.loads(command("devices", "--json")[1])}


def test_bench_against_onnx_runtime(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    code, out, _ = command(
        "bench", "mlp", "--rounds", 1, "--peer", "onnxruntime", "-o", tmp_path / "result.json", "--json"
    )
    result = json.loads(out)
    assert code == 0
    assert [item["name"] for item in result["timings"]] == ["tvm_ext", "onnxruntime"]
    assert result["timings"][0]["relative_error"] < 1e-4
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_cache_is_shown_and_cleared(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_KERNEL_CACHE", str(tmp_path / "kernels"))
    assert "0 kernels, 0.0 MB" in command("cache")[1]
    command("compile", "mlp", "-o", tmp_path / "m.so")
    state = json.loads(command("cache", "--json")[1])
    assert state["folder"] == str(tmp_path / "kernels")
    assert state["kernels"] >= 3
    assert 0 < state["bytes"] <= state["limit_bytes"]
    assert f"deleted {state['kernels']} kernels" in command("cache", "--clear")[1]
    assert json.loads(command("cache", "--json")[1])["kernels"] == 0
    monkeypatch.setenv("TVM_EXT_KERNEL_CACHE", "off")
    assert "switched off" in command("cache")[1]


def test_doctor_finds_this_installation_sound(command: Command) -> None:
    code, out, _ = command("doctor", "--json")
    findings = json.loads(out)
    assert [item for item in findings if item["state"] == "problem"] == []
    assert code == 0
    assert {"threads", "cache", "C++ compiler", "small build"} <= {item["name"] for item in findings}


def test_doctor_exit_code_and_remedy(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = HealthCheck(name="compiler", state="problem", detail="there is none", remedy="install one")
    monkeypatch.setattr(doctor, "examine", lambda _libraries: iter([finding]))
    code, out, _ = command("doctor")
    assert code == 1
    assert "there is none" in out
    assert "remedy: install one" in out


def test_doctor_goes_on_after_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise InputError("no cache", "make one")

    monkeypatch.setattr(doctor, "cache_directory", broken)
    found = doctor.examine()
    failed = next(item for item in found if item.name == "cache")
    assert (failed.state, failed.remedy) == ("problem", "make one")
    assert (behind := next(found)).name == "C++ compiler" and behind.state == "ok"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "resnet5"], "did you mean resnet50"),
        (["compile", "mlp", "--target", "lvm"], "llvm"),
        (["compile", "mlp", "--shape", "x"], "NAME=SIZE"),
        (["compile", "mlp", "--shape", "y=1,784"], "'x'"),
        (["run", "missing.so"], "there is no file"),
        (["run", "mlp", "--input", "x=missing.npy"], "cannot be read"),
        (["devices", "v10"], "v100"),
        (["bench", "mlp", "--peer", "pytorch"], "onnxruntime"),
    ],
)
def test_errors_are_one_sentence_with_a_remedy(
    command: Command, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "\nremedy: " in err
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(OptionError):
        main(["--debug", "compile", "mlp", "--shape", "x"])


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("frozen.pb", "--graphdef"),
        ("saved", "--saved-model saved"),
        ("light.tflite", "--tflite"),
        ("m.pt", "from_torch"),
    ],
)
def test_files_of_other_frameworks_say_what_makes_onnx_of_them(
    command: Command, name: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = b"\x0a\x10\x0a\x01x\x12\x0bPlaceholder"  # TensorFlow's GraphDef of one node
    if name == "saved":
        Path(name).mkdir()
        Path(name, "saved_model.pb").write_bytes(graph)
    else:
        Path(name).write_bytes(graph)
    code, _, err = command("compile", name)
    assert code == 2 and remedy in err
    if name != "m.pt":
        assert "python -m tf2onnx.convert" in err


def test_shapes_say_types_too() -> None:
    assert common.parse_shapes(["ids=1,8:int64", "a:b=2x3", "c="]) == {"ids": [1, 8], "a:b": [2, 3], "c": []}
    assert common.parse_types(["ids=1,8:int64", "a:b=2x3", "c="]) == {"ids": "int64"}


def test_a_corrupt_model_is_an_error_not_a_crash(command: Command, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07broken")
    code, _, err = command("compile", tmp_path / "broken.onnx", "-o", tmp_path / "m.so")
    assert code == 2
    assert "broken.onnx" in err
    assert not (tmp_path / "m.so").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("input=1,3,224,224", ("input", [1, 3, 224, 224])), ("a=b=2x3", ("a=b", [2, 3])), ("scalar=", ("scalar", []))],
)
def test_shapes(text: str, expected: tuple[str, list[int]]) -> None:
    assert parse_shapes([text]) == dict([expected])


@pytest.mark.parametrize("text", ["", "=1,2", "x", "x=1,-2", "x=1.5", "x=a"])
def test_wrong_shapes(text: str) -> None:
    with pytest.raises(OptionError, match="--shape"):
        parse_shapes([text])


def _read_all(terminal: int, seen: list[bytes]) -> None:
    """Everything written to a pseudo-terminal, which itself holds a few KiB only, until its writers are gone."""
    with contextlib.suppress(OSError):  # how Linux says that no writer is left
        while piece := os.read(terminal, 1 << 16):
            seen.append(piece)


def test_progress_shows_on_a_terminal_only(tmp_path: Path) -> None:
    """In a pseudo-terminal the error stream shows steps; through a pipe it stays silent (see above)."""
    reader, writer = pty.openpty()
    arguments = [sys.executable, "-m", "tvm_ext.cli", "compile", "mlp", "-o", str(tmp_path / "m.so")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    seen: list[bytes] = []
    drain = threading.Thread(target=_read_all, args=(reader, seen))
    drain.start()
    result = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=writer, env=environment, timeout=300)
    os.close(writer)
    drain.join()
    os.close(reader)
    shown = b"".join(seen).decode(errors="replace")
    assert result.returncode == 0
    assert "━" in shown
    assert "writing" in shown
    assert "━" not in result.stdout.decode()
