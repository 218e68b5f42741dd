"""Builds with a kernel cache: what finds an entry, what becomes of a broken one, and builds at the same time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.unit.chain_modules import Conv, conv_chain
from tests.unit.support.cached_builds import build, counts, files, model, run
from tvm_ext import relay
from tvm_ext.errors import ExportError
from tvm_ext.options import BuildOptions
from tvm_ext.support import kernel_cache
from tvm_ext.support.kernel_cache import CachedKernel, KernelCache, decode, encode
from tvm_ext.toolchains import code_generation, host_compiler


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """A cache that has the kernels of `model`."""
    build(tmp_path / "kernels")
    return tmp_path / "kernels"


# --- keys ------------------------------------------------------------------------------------------------------------


def test_another_version_of_our_sources_finds_nothing(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "SOURCES", "others")
    assert counts(build(warm))[0] == 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("settings", [{"candidates": 1}, {"num_threads": 1}, {"epsilon": 0.4}, {"winograd": "off"}])
def test_other_options_find_nothing(warm: Path, settings: dict[str, object]) -> None:
    assert counts(build(warm, **settings))[0] == 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("form", ["auto", "fast"])
def test_kernels_with_transformed_weights_are_found(tmp_path: Path, form: str) -> None:
    """Their weights have another shape than what is packed of them."""
    layers = [Conv(filters=32, kernel=3, padding=1)] * 3
    settings = {"layout": "NCHWc", "enable_persistent_fusion": False, "device": "cpu-epyc-zen5", "winograd": form}
    first, second = (build(tmp_path, conv_chain((1, 32, 27, 34), *layers).mod, **settings) for _ in range(2))
    assert any("in Winograd's form" in operator.choice.reason for operator in second.report.operators)
    assert counts(second) == (counts(first)[1], 0)
    assert not second.report.kernel_cache.notes


def test_pass_settings_are_part_of_the_key(warm: Path) -> None:
    with tvm.transform.PassContext(config={"tirx.disable_vectorize": True}):
        assert counts(build(warm))[0] == 0


def test_another_model_finds_the_kernels_they_share(warm: Path) -> None:
    hits, misses = counts(build(warm, model(width=30)))
    assert hits == 0
    assert misses > 0
    assert counts(build(warm)) == (2, 0)


# --- builds ----------------------------------------------------------------------------------------------------------


def test_a_cached_build_computes_the_same_bit_for_bit(warm: Path, tmp_path: Path) -> None:
    found, anew = build(warm), build("off")
    assert counts(found) == (2, 0)
    assert anew.report.kernel_cache.folder is None
    np.testing.assert_array_equal(run(found), run(anew))
    assert found.report.operators == anew.report.operators
    found.export_library(tmp_path / "model.so")
    np.testing.assert_array_equal(run(relay.load(tmp_path / "model.so")), run(anew))


def test_the_kernels_compiled_as_one_module_compute_the_same(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(build(warm))
    monkeypatch.setattr(relay, "can_link", lambda: False)
    whole = build(warm)
    assert whole.report.kernel_cache.folder is None
    assert whole.report.code.compiled == 0
    np.testing.assert_array_equal(run(whole), expected)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
        lambda path: path.write_bytes(path.read_bytes().replace(b"kernel 1 ", b"kernel 9 ", 1)),
    ],
    ids=["empty", "truncated", "corrupt", "schema"],
)
def test_a_damaged_entry_is_reported_once_and_made_anew(warm: Path, damage: Callable[[Path], object]) -> None:
    expected = run(build(warm))
    for path in files(warm):
        damage(path)
    with pytest.warns(RuntimeWarning, match="corrupt entry") as caught:
        library = build(warm)
    assert len([item for item in caught if "corrupt" in str(item.message)]) == 1
    assert counts(library) == (0, 2)
    assert len(library.report.kernel_cache.notes) == 1
    np.testing.assert_array_equal(run(library), expected)
    assert counts(build(warm)) == (2, 0)


def test_a_folder_in_an_entrys_place_is_no_error(warm: Path) -> None:
    for path in files(warm):
        path.unlink()
        path.mkdir()
    with pytest.warns(RuntimeWarning, match="kernel cache"):
        library = build(warm)
    assert counts(library)[0] == 0
    assert np.isfinite(run(library)).all()


def test_a_folder_that_cannot_be_made_is_reported_and_the_build_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        library = build(tmp_path / "file" / "kernels")
    assert counts(library) == (0, 2)
    assert len(library.report.kernel_cache.notes) == 1
    assert np.isfinite(run(library)).all()


def test_a_file_in_the_folders_place_switches_the_cache_off(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="not a folder"):
        library = build(tmp_path / "kernels")
    assert library.report.kernel_cache.folder is None
    assert np.isfinite(run(library)).all()


def test_a_full_disk_is_reported_and_the_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _content: bytes, *, durable: bool, private: bool) -> None:
        raise ExportError(f"cannot write {path}: No space left on device.", "free some space")

    monkeypatch.setattr(kernel_cache, "write_atomically", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        library = build(tmp_path)
    assert np.isfinite(run(library)).all()


def test_object_files_that_cannot_be_written_leave_the_whole_module(
    warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, size_bytes: int) -> None:
        raise ExportError(f"{folder} has no room for {size_bytes} bytes.", "free some space")

    expected = run(build(warm))
    monkeypatch.setattr(code_generation, "check_space", full)
    kernel_cache.clear(warm)
    with pytest.warns(RuntimeWarning, match="has no room"):
        library = build(warm)
    np.testing.assert_array_equal(run(library), expected)


def test_a_linker_that_fails_leaves_the_whole_module(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("ld: killed")

    expected = run(build(warm))
    monkeypatch.setattr(host_compiler, "create_shared", broken)
    with pytest.warns(RuntimeWarning, match="ld: killed"):
        library = build(warm)
    np.testing.assert_array_equal(run(library), expected)


def test_code_under_another_name_is_not_linked(warm: Path) -> None:
    expected = run(build(warm))
    for path in files(warm):
        kernel = decode(path.read_bytes())
        path.write_bytes(encode(CachedKernel(replace(kernel.record, symbol="another"), kernel.code)))
    with pytest.warns(RuntimeWarning, match="bears another name"):
        library = build(warm)
    np.testing.assert_array_equal(run(library), expected)


def test_one_thread_and_many_compile_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []
    for threads in (1, 4):
        monkeypatch.setattr(relay, "usable_core_count", lambda threads=threads: threads)
        library = build(tmp_path / str(threads))
        assert library.report.code.threads == min(threads, 2)
        codes.append(sorted(decode(path.read_bytes()).code for path in files(tmp_path / str(threads))))
    assert codes[0] == codes[1]


def test_an_error_in_a_thread_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> None:
        raise ArithmeticError("in a thread")

    monkeypatch.setattr(code_generation, "_compile", broken)
    monkeypatch.setattr(relay, "usable_core_count", lambda: 4)
    with pytest.raises(ArithmeticError, match="in a thread"):
        build(tmp_path)


def test_what_is_compiled_during_construction_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two 3x3 layers, whose weights are packed, and others."""
    compiled: list[str] = []
    compile_one = code_generation._compile

    def counted(kernel: Any, *arguments: Any) -> Any:
        compiled.append(kernel.symbol)
        return compile_one(kernel, *arguments)

    monkeypatch.setattr(code_generation, "_compile", counted)
    monkeypatch.setattr(relay, "usable_core_count", lambda: 2)
    started: list[str] = []
    monkeypatch.setattr(
        code_generation.Compiler,
        "start",
        lambda self, symbol, func, start=code_generation.Compiler.start: (
            started.append(symbol),
            start(self, symbol, func),
        ),
    )
    chain = conv_chain((1, 32, 14, 14), *[Conv(filters=32, kernel=3, padding=1)] * 2).mod
    library = build(tmp_path, chain, layout="NCHWc", device="cpu-epyc-zen5")
    assert sorted(started) == sorted(compiled)
    assert len(started) == library.report.code.compiled >= 2
    assert any(symbol.endswith("_packed") for symbol in started)


def test_the_users_instruments_see_the_passes_of_code_generation(tmp_path: Path) -> None:
    @tvm.ir.instrument.pass_instrument
    class Names:
        def __init__(self) -> None:
            self.names: list[str] = []

        def run_before_pass(self, _mod: object, info: object) -> None:
            self.names.append(str(info.name))  # type: ignore[attr-defined]

    names = Names()
    with tvm.transform.PassContext(instruments=[names]):
        build(tmp_path)
    assert "tirx.VectorizeLoop" in names.names


def test_equal_functions_are_constructed_once(tmp_path: Path) -> None:
    from tvm_ext.devices.device_db import device_for_target
    from tvm_ext.tir_passes.construct_kernels import ConstructKernels

    device, target = device_for_target("llvm")
    with target:
        legal = relax.transform.LegalizeOps()(model())
        (product,) = (f for gv, f in legal.functions_items() if gv.name_hint == "matmul")
        twins = tvm.IRModule({"first": product, "second": product})
        cache = KernelCache(None)
        made = ConstructKernels(device, BuildOptions(), cache=cache)(twins)
    assert cache.duplicates == 1
    names = [str(made[name].attrs["tvm_ext.choice"]) for name in ("first", "second")]
    assert '"operator":"first"' in names[0]
    assert '"operator":"second"' in names[1]
    tvm.ir.assert_structural_equal(made["first"].body, made["second"].body, map_free_vars=True)


# --- processes -------------------------------------------------------------------------------------------------------

BUILD = """
from tests.unit.chain_modules import Conv, conv_chain
from tests.unit.support.cached_builds import build, counts, run
from tvm_ext.support import kernel_cache
kernel_cache.SOURCES = "as the test's"  # sources may be edited while tests run
library = build({folder!r})
print("result", counts(library), run(library).tobytes().hex())
"""


def _start(folder: Path) -> subprocess.Popen[str]:
    code = BUILD.format(folder=str(folder))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def _result(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return output.splitlines()[-1]


def test_two_builds_at_once_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "SOURCES", "as the test's")
    results = [_result(process) for process in [_start(tmp_path), _start(tmp_path)]]
    assert results[0].split()[-1] == results[1].split()[-1] == run(build("off")).tobytes().hex()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counts(build(tmp_path)) == (2, 0)


@pytest.mark.slow  # tests/attack/test_kills.py kills two everyday
def test_a_build_that_is_killed_leaves_no_broken_entry(tmp_path: Path) -> None:
    process = _start(tmp_path)
    deadline = time.monotonic() + 200
    while not files(tmp_path) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)  # until the first entry appears: others are being written
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert files(tmp_path)
    for path in files(tmp_path):
        decode(path.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library = build(tmp_path)
    np.testing.assert_array_equal(run(library), run(build("off")))
