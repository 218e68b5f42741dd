"""The kernel cache holds machine code: what others can have put there is not read, and nothing in it fails a build."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.errors import OptionError
from tvm_ext.options import cache_directory, kernel_cache_directory
from tvm_ext.runtime.library import Library
from tvm_ext.support import kernel_cache
from tvm_ext.support.kernel_cache import CachedKernel, KernelParam, decode, encode

X = np.random.default_rng(0).standard_normal((5, 7)).astype("float32")
W = np.random.default_rng(1).standard_normal((7, 6)).astype("float32")
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def build(folder: Path | str) -> Library:
    x = relax.Var("x", relax.TensorType(X.shape, "float32"))
    mod: tvm.IRModule = module_of([x], relax.op.nn.relu(relax.op.matmul(x, relax.const(W))))
    return relay.build(mod, kernel_cache=str(folder))


def check(folder: Path | str, hits: int) -> None:
    """A build with the cache ``folder`` is right and takes ``hits`` kernels from it."""
    library = build(folder)
    np.testing.assert_allclose(library.vm()["main"](X).numpy(), np.maximum(X @ W, 0), rtol=1e-5, atol=1e-5)
    assert library.report.kernel_cache.hits == hits


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """The one entry of a cache that is warm."""
    build(tmp_path / "kernels")
    (path,) = [path for path, _, _ in kernel_cache.entries(tmp_path / "kernels")]
    check(folder_of(path), hits=1)
    return path


def folder_of(entry: Path) -> Path:
    return entry.parents[1]


@pytest.mark.usefixtures("entry")
def test_the_cache_is_the_users_alone(tmp_path: Path) -> None:
    for path in (tmp_path / "kernels").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert (tmp_path / "kernels").stat().st_mode & 0o077 == 0


def to_symbolic_link(entry: Path) -> None:
    elsewhere = folder_of(entry).parent / "elsewhere"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)


def folder_to_symbolic_link(entry: Path) -> None:
    elsewhere = folder_of(entry).parent / "elsewhere"
    entry.parent.rename(elsewhere)
    entry.parent.symlink_to(elsewhere)


def to_fifo(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry, 0o600)


UNTRUSTED: dict[str, Callable[[Path], object]] = {
    "an entry that all may write": lambda entry: entry.chmod(0o666),
    "an entry that the group may write": lambda entry: entry.chmod(0o620),
    "a folder that all may write": lambda entry: entry.parent.chmod(0o777),
    "a cache that all may write": lambda entry: folder_of(entry).chmod(0o777),
    "a cache that all may write, sticky": lambda entry: folder_of(entry).chmod(0o1777),
    "an absurd size": lambda entry: os.truncate(entry, 1 << 40),
    "a FIFO": to_fifo,
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("change", UNTRUSTED.values(), ids=UNTRUSTED.keys())
@pytest.mark.timeout(60)
def test_what_others_could_have_written_is_not_read(entry: Path, change: Callable[[Path], object]) -> None:
    change(entry)
    with pytest.warns(RuntimeWarning, match=r"nothing is read.*chmod -R go-w"):
        check(folder_of(entry), hits=0)


@as_root
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["entry", "folder", "cache"])
def test_what_belongs_to_another_user_is_not_read(entry: Path, which: int) -> None:
    os.chown([entry, entry.parent, folder_of(entry)][which], NOBODY, NOBODY)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        check(folder_of(entry), hits=0)


@as_root
def test_a_device_is_not_read(entry: Path) -> None:
    entry.unlink()
    os.mknod(entry, 0o020600, os.makedev(1, 5))  # /dev/zero
    with pytest.warns(RuntimeWarning, match="no plain file"):
        check(folder_of(entry), hits=0)


@pytest.mark.parametrize("change", [to_symbolic_link, folder_to_symbolic_link])
def test_symbolic_links_are_not_followed(entry: Path, change: Callable[[Path], object]) -> None:
    change(entry)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        check(folder_of(entry), hits=0)


# --- entries that are sealed and wrong --------------------------------------------------------------------------------
def resealed() -> Iterator[tuple[str, Callable[[CachedKernel], CachedKernel]]]:
    def with_record(**changes: object) -> Callable[[CachedKernel], CachedKernel]:
        return lambda kernel: replace(kernel, record=replace(kernel.record, **changes))

    def with_choice(old: str, new: str) -> Callable[[CachedKernel], CachedKernel]:
        def change(kernel: CachedKernel) -> CachedKernel:
            assert old in kernel.record.choice
            return replace(kernel, record=replace(kernel.record, choice=kernel.record.choice.replace(old, new)))

        return change

    param = KernelParam(name="x", shape=(5, 7), dtype="float32")
    yield "no parameters", with_record(params=())
    yield "one parameter too many", with_record(params=(param,) * 4)
    yield "other shapes", with_record(params=(param,) * 3)
    yield "negative extent", with_record(params=(param, replace(param, shape=(-7, 6)), replace(param, shape=(5, 6))))
    yield "extents that are texts", with_record(params=(replace(param, shape=("5", "7")),) * 3)
    yield "a type that TVM has not", with_record(params=(replace(param, dtype="float31"),) * 3)
    yield "another symbol", with_record(symbol="main")
    yield "a symbol that is a number", with_record(symbol=7)
    yield "a choice that is no JSON", with_record(choice="{")
    yield "an empty choice", with_record(choice="{}")
    yield "a choice of another path", with_choice('"rtile"', '"elsewhere"')
    yield "a choice with a text for a number", with_choice('"flops":', '"flops":"many","bytes":1,"was":')
    yield "no code", lambda kernel: replace(kernel, code=b"")
    yield "code that is none", lambda kernel: replace(kernel, code=b"\x7fELF" + bytes(1000))
    yield "half the code", lambda kernel: replace(kernel, code=kernel.code[: len(kernel.code) // 2])


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in resealed()])
def test_a_sealed_entry_with_wrong_contents_is_made_anew(
    entry: Path, change: Callable[[CachedKernel], CachedKernel]
) -> None:
    entry.write_bytes(encode(change(decode(entry.read_bytes()))))
    with pytest.warns(RuntimeWarning, match=r"made anew|not kept"):
        check(folder_of(entry), hits=0)


# --- names of folders -------------------------------------------------------------------------------------------------
NAMES = ["/tmp/a\0b", "/tmp/" + "x" * 5000, "/tmp/" + "y" * 300, "~no such user/cache", "/dev/null", "/dev/null/cache"]


@pytest.mark.parametrize("name", NAMES, ids=["NUL", "long path", "long name", "unknown user", "device", "below one"])
def test_a_name_that_no_folder_can_have_never_fails_a_build(name: str) -> None:
    with pytest.warns(RuntimeWarning, match=r"no kernel cache|cannot be kept"):
        check(name, hits=0)


@pytest.mark.parametrize("name", [name for name in NAMES if "\0" not in name and not name.endswith("/cache")])
def test_a_wrong_name_in_the_environment_is_an_option_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_KERNEL_CACHE", name)
    with pytest.raises(OptionError, match="kernel cache"):
        kernel_cache_directory()
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", name)
    with pytest.raises(OptionError, match="TVM_EXT_CACHE_DIR"):
        cache_directory()
