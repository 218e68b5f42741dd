"""Exported libraries whose bytes have changed: none is loaded, whatever changed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.cli.doctor import examine
from tvm_ext.errors import ExportError
from tvm_ext.runtime import export

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
