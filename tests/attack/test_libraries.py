"""Exported libraries whose bytes have changed, before or after they were loaded: none runs as what it has become."""

from __future__ import annotations

import gc
import mmap
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.attack import libraries
from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.cli import doctor
from tvm_ext.errors import ExportError
from tvm_ext.runtime import export
from tvm_ext.support import shared_library, weights

X = np.random.default_rng(0).standard_normal((5, 7)).astype("float32")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = relax.Var("x", relax.TensorType(X.shape, "float32"))
    path: Path = tmp_path_factory.mktemp("library") / "model.so"
    relay.build(module_of([x], relax.op.nn.relu(relax.op.add(x, relax.const(X)))), kernel_cache="off").export_library(
        path
    )
    return path


def check_result(path: Path) -> None:
    np.testing.assert_array_equal(relay.load(path).vm()["main"](X).numpy(), np.maximum(X + X, 0))


def test_what_was_exported_is_loaded_and_exported_again(library: Path, tmp_path: Path) -> None:
    check_result(library)
    relay.load(library).export_library(tmp_path / "again.so")
    check_result(tmp_path / "again.so")
    shutil.copy(library, tmp_path / "copy.so")
    check_result(tmp_path / "copy.so")


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_anywhere_is_noticed(library: Path, tmp_path: Path, seed: int) -> None:
    """A hundred libraries each; without the digest one in ten gave other outputs and one in nine crashed."""
    generator = np.random.default_rng(seed)
    content = library.read_bytes()
    for number in range(100):
        changed = bytearray(content)
        changed[int(generator.integers(len(content)))] ^= 1 << int(generator.integers(8))
        path = tmp_path / f"{number}.so"
        path.write_bytes(changed)
        with pytest.raises(ExportError, match=r"digest|cut off|lost"):
            relay.load(path)
        path.unlink()


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "one byte more": lambda content: content + b"\n",
    "one byte less": lambda content: content[:-1],
    "a byte in the middle": lambda content: content[:5000] + b"x" + content[5000:],
    "no digest": lambda content: content[: content.rindex(b"\ntvm_ext library")],
    "another digest": lambda content: content[:-65] + b"0" * 64 + b"\n",
    "digest of something else": lambda content: content + content[content.rindex(b"\ntvm_ext library") :],
    "nothing but a digest": lambda content: content[content.rindex(b"\ntvm_ext library") :],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_other_damage_is_an_error_too(library: Path, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "changed.so"
    path.write_bytes(change(library.read_bytes()))
    with pytest.raises(ExportError):
        relay.load(path)


def test_a_library_of_somebody_else_is_called_so(tmp_path: Path) -> None:
    source, path = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int answer(void) { return 42; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    assert export.check_seal(path) == ""
    with pytest.raises(ExportError, match=r"not exported by tvm_ext|cannot be loaded"):
        relay.load(path)


def test_the_doctor_shows_the_digest(library: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.so"
    changed.write_bytes(library.read_bytes()[:-1] + b" ")
    good, bad, missing = map(doctor._library, (library, changed, tmp_path / "absent.so"))
    assert (good.state, bad.state, missing.state) == ("ok", "problem", "problem")
    assert export.check_seal(library) in good.detail
    assert "digest does not fit" in bad.detail


# --- files that change after they were loaded -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models with other weights, as libraries."""
    folder = tmp_path_factory.mktemp("versions")
    for seed in range(2):
        libraries.build(seed=seed).export_library(folder / f"{seed}.so")
    return folder / "0.so", folder / "1.so"


def replace_atomically(source: Path, path: Path) -> None:
    shutil.copyfile(source, path.with_name("new"))
    path.with_name("new").replace(path)


WAYS = {"moved into place": replace_atomically, "written in place": shutil.copyfile}


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Where the copies lie that are mapped."""
    if request.param == "disk":
        monkeypatch.setattr(shared_library, "_memory_runs", lambda: False)
    elif not shared_library._memory_runs():
        pytest.skip("files in memory cannot be mapped as code here")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return str(request.param)


def computes(loaded: relay.Library, seed: int, number: int = 1) -> bool:
    return libraries.is_right(loaded.vm()["main"](libraries.value(number)), number, seed=seed)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_file_that_is_replaced_is_loaded_anew_and_the_old_model_runs_on(
    way: Callable[[Path, Path], object], where: str, versions: tuple[Path, Path], tmp_path: Path
) -> None:
    path, loaded = tmp_path / "model.so", []
    for seed in (0, 1, 0):
        way(versions[seed], path)
        loaded.append((relay.load(path), seed))
    assert not list((tmp_path / "temporary").iterdir())
    path.write_bytes(b"\0" * 100_000)
    assert all(computes(*item) for item in loaded)
    path.unlink()
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(lambda number: computes(*loaded[number % 3], number), range(30)))


def test_threads_load_what_lies_there_while_another_one_exports(versions: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.so"
    replace_atomically(versions[0], path)

    def load(number: int) -> int:
        if number % 4 == 0:
            replace_atomically(versions[number // 4 % 2], path)
        loaded = relay.load(path)
        return [computes(loaded, seed, number) for seed in range(2)].count(True)

    with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(4) as pool:
        writing = writer.submit(lambda: [load(4 * number) for number in range(8)])
        assert list(pool.map(load, (1, 2, 3) * 10)) == [1] * 30
        assert writing.result() == [1] * 8


def test_one_library_comes_and_goes_in_many_threads(versions: tuple[Path, Path]) -> None:
    """Each copy registers a loader of one name, and takes it away: no load may find another copy's, or none."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(lambda _: relay.load(versions[0]) is not None, range(200))) == 200
    finally:
        sys.setswitchinterval(interval)


def test_what_was_replaced_is_not_exported_as_what_was_loaded(versions: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.so"
    shutil.copyfile(versions[0], path)
    loaded = relay.load(path)
    loaded.export_library(tmp_path / "again.so")
    shutil.copyfile(versions[1], path)
    with pytest.raises(ExportError, match=r"model\.so is another library than the one that was loaded"):
        loaded.export_library(tmp_path / "again.so")
    assert (tmp_path / "again.so").read_bytes() == versions[0].read_bytes()
    path.unlink()
    with pytest.raises(ExportError, match=r"model\.so, which this library was loaded from, is gone"):
        loaded.export_library(tmp_path / "again.so")


@pytest.mark.usefixtures("where")
def test_the_loader_speaks_of_the_file_that_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "model.so"
    path.write_text("int x;")
    with pytest.raises(ExportError, match=r"model\.so: file too short") as caught:
        relay.load(path)
    assert not re.search(r"/proc|temporary", str(caught.value))


def test_a_copy_is_gone_with_the_last_that_uses_it(versions: tuple[Path, Path]) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:0.so")

    loaded = relay.load(versions[0])
    machine = loaded.vm()
    assert mapped()
    del loaded
    gc.collect()
    assert libraries.is_right(machine["main"](libraries.value(1)), 1)
    del machine
    gc.collect()
    assert not mapped()


# --- weights behind the code ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def weighty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with 256 KiB of weights behind its code, which this package reads itself."""
    path: Path = tmp_path_factory.mktemp("weighty") / "model.so"
    libraries.build(256).export_library(path)
    with path.open("rb") as file:
        if weights.find(file) is None:
            pytest.skip("the native part is not built here")
    return path


def place_of(path: Path) -> weights.Weights:
    with path.open("rb") as file:
        found = weights.find(file)
    assert found is not None
    return found


def test_weights_lie_behind_the_code_once_and_at_cache_lines(weighty: Path) -> None:
    place, weight = place_of(weighty), np.sort(libraries._weight(256, 0).ravel())
    assert 4 * 256 * 256 <= place.size_bytes < 4 * 256 * 256 + 4096
    content = weighty.read_bytes()
    kept = np.frombuffer(content[place.offset : place.offset + 4 * 256 * 256], "float32")
    np.testing.assert_array_equal(np.sort(kept), weight)
    assert content.count(kept[:16].tobytes()) == 1
    with shared_library.private_copy(weighty) as copy:
        assert copy.stat().st_size < place.offset + 4096


def test_stock_tvm_loads_weights_and_its_copies_are_apart(weighty: Path) -> None:
    for _ in range(2):  # two mappings of one file
        machine = relax.VirtualMachine(shared_library.load_library(weighty), tvm.cpu())
        assert libraries.is_right(machine["main"](libraries.value(1, 256)), 1, 256)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(weighty)), tvm.cpu())
    assert libraries.is_right(machine["main"](libraries.value(2, 256)), 2, 256)


def test_a_weight_that_is_an_output_outlives_its_library(tmp_path: Path) -> None:
    x, path = relax.Var("x", relax.TensorType((64, 64), "float32")), tmp_path / "model.so"
    value = np.random.default_rng(1).standard_normal((64, 64)).astype("float32")
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            outputs = builder.emit(relax.op.add(x, relax.const(value))), relax.const(value)
            result = builder.emit_output(relax.Tuple(outputs))
        builder.emit_func_output(result)
    relay.build(builder.get(), kernel_cache="off").export_library(path)
    machine = shared_library.load_library(path)
    results = relax.VirtualMachine(machine, tvm.cpu())["main"](np.zeros((64, 64), "float32"))
    del machine
    gc.collect()
    assert "/memfd:model.so" not in Path("/proc/self/maps").read_text()
    for own in results:
        np.testing.assert_array_equal(own.numpy(), value)


DAMAGE: dict[str, Callable[[bytes, weights.Weights], bytes]] = {
    "weights are cut off": lambda content, place: content[: place.offset + 100],
    "the mark is gone": lambda content, place: content[: content.rindex(b"\ntvm_ext weights ")],
    "the mark is another library's": lambda content, place: content.replace(
        f"weights {place.identity}".encode(), b"weights " + b"0" * 32
    ),
    "weights are said to go on": lambda content, place: content.replace(
        f" {place.size_bytes} ".encode(), f" {place.size_bytes}000 ".encode()
    ),
    "constants are said to be more": lambda content, place: content.replace(
        f" {place.constant_count} here".encode(), b" 99 here"
    ),
    "a weight has changed": lambda content, place: (
        content[: place.offset + 9] + bytes([content[place.offset + 9] ^ 1]) + content[place.offset + 10 :]
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_are_an_error(weighty: Path, tmp_path: Path, damage: str) -> None:
    """Stock TVM looks at no digest, so that it takes changed values for those of the model."""
    path = tmp_path / "model.so"
    path.write_bytes(DAMAGE[damage](weighty.read_bytes(), place_of(weighty)))
    with pytest.raises(ExportError, match=r"digest|cut off|lost"):
        relay.load(path)
    if damage != "a weight has changed":
        with pytest.raises(RuntimeError, match=r"model\.so was (cut off|replaced|exported for another TVM)"):
            tvm.runtime.load_module(str(path))


def test_a_library_without_the_loader_keeps_its_weights_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries of earlier versions, and those of systems for which there is no native part."""
    monkeypatch.setattr(weights._native, "can_load", lambda name: False)
    libraries.build(256).export_library(tmp_path / "model.so")
    monkeypatch.undo()
    assert libraries.is_right(relay.load(tmp_path / "model.so").vm()["main"](libraries.value(1, 256)), 1, 256)


def test_names_of_copies_do_not_recur_and_lead_to_the_file() -> None:
    with tempfile.TemporaryFile() as file:
        names = [shared_library._new_name(file.fileno()) for _ in range(300)]
        assert len({str(name) for name in names}) == 300
        assert all(name.samefile(f"/proc/self/fd/{file.fileno()}") for name in names)


def test_memory_that_cannot_be_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise PermissionError("memory is not to be run")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert not shared_library._memory_runs.__wrapped__()
