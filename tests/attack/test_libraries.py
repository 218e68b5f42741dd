"""Exported libraries whose bytes have changed, before or after they were loaded: none runs as what it has become."""

from __future__ import annotations

import gc
import mmap
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tvm import relax

from tests.attack import libraries
from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.cli.doctor import examine
from tvm_ext.errors import ExportError
from tvm_ext.runtime import export
from tvm_ext.support import shared_library

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
    good, bad, missing = list(examine([library, changed, tmp_path / "absent.so"]))[-3:]
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


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    path = tmp_path / "model.so"
    libraries.build(256).export_library(path)
    with shared_library.private_copy(path) as copy:
        before = 512 * copy.stat().st_blocks
        module = shared_library.load_copy(copy)
        shared_library._drop_imports(copy, int(copy.name))
        assert before - 512 * copy.stat().st_blocks >= 4 * 256 * 256 - 4096
    machine = relay.Library.from_module(module).vm()
    assert libraries.is_right(machine["main"](libraries.value(1, 256)), 1, 256)


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
