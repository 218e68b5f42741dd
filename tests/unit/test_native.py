"""Compiled parts that are older than their sources: an editable installation compiles only when it is installed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tvm_ext import _autoload, _native
from tvm_ext.cli import doctor

FOLDERS = {
    _native.OPTIONS_LIBRARY: "",
    _native.RUNTIME_LIBRARY: "rammer",
    _native.PROVIDER_LIBRARY: "onnxruntime",
    _native.WEIGHTS_LIBRARY: "weights",
}


@pytest.fixture(params=FOLDERS)
def library(request: pytest.FixtureRequest) -> str:
    if _native.library_path(request.param) is None:
        pytest.skip("the native part is not built here")
    return str(request.param)


@pytest.fixture
def sources(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one native source, from which `library` was built; not the real one."""
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "part.cc"
    source.write_text("int f() { return 1; }\n")
    built_from = {"part.cc": hashlib.sha256(source.read_bytes()).hexdigest()}
    monkeypatch.setattr(_native, "_source_folder", lambda: source.parent)
    monkeypatch.setattr(_native, "_source_digests", lambda _path: built_from)
    return source


def test_libraries_here_are_built_from_the_sources_here(library: str) -> None:
    assert _native.outdated(library) is None


def test_a_library_knows_all_its_sources(library: str) -> None:
    path, folder = _native.library_path(library), _native._source_folder()
    assert path is not None
    within = folder / FOLDERS[library]
    expected = {file for file in within.iterdir() if file.suffix in (".cc", ".h", ".txt")}
    known = _native._source_digests(path)
    assert known is not None
    assert {folder / source for source in known} == expected


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_a_changed_source_is_named_with_the_remedy(change: str, library: str, sources: Path) -> None:
    assert _native.outdated(library) is None
    if change == "edited":
        sources.write_text("int f() { return 2; }\n")
    else:
        sources.unlink()
    problem, remedy = _native.outdated(library) or ("", "")
    assert f"lib{library}" in problem
    assert "part.cc" in problem
    assert "pip install" in remedy


def test_a_library_that_names_no_sources_is_outdated(
    library: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "_source_digests", lambda _path: None)
    problem, _ = _native.outdated(library) or ("", "")
    assert "does not say" in problem


def test_a_foreign_library_names_no_sources() -> None:
    import tvm_ffi.libinfo

    assert _native._source_digests(Path(tvm_ffi.libinfo.find_libtvm_ffi())) is None


def test_a_wheel_has_no_sources_to_compare_with(library: str, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_source_folder", lambda: sources.parent / "absent")
    monkeypatch.setattr(_native, "_source_digests", lambda _path: None)
    assert _native.outdated(library) is None


def test_whoever_loads_an_outdated_library_is_warned_and_the_doctor_says_it(
    library: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources.write_text("int f() { return 2; }\n")
    monkeypatch.setattr(_native, "load", lambda _name: True)
    with monkeypatch.context() as patch:
        patch.setattr(_native, "is_loaded", lambda _name: False)
        with pytest.warns(RuntimeWarning, match=r"part\.cc.*pip install"):
            _autoload._load(library, "part is")
    (found,) = [check for check in doctor._native_part() if library in check.detail and check.state == "note"]
    assert "pip install" in found.remedy
