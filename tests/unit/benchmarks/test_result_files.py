"""Results in the repository say from which sources they were measured: ``benchmarks/_common.py``, and every script."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from tvm_ext.bench import environment as environments
from tvm_ext.errors import InputError

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CLEAN, DIRTY = "0123456789ab", "0123456789ab+"

# What writes files itself, and why that is no result of the repository.
WRITERS = {
    "_common.py": "the one place",
    "walk.py": "a page of docs/, whose times are no measurements",
    "gpu/bundle.py": "what is carried to the machine with the GPU",
    "gpu/bundle_code.py": "the libraries of it",
    "gpu/bundle_templates.py": "the object of templates that those link",
    "gpu/bundle_runtime.py": "what is carried there besides kernels",
    "gpu/run.py": "runs there, without this package; `import_results.py` takes in what it writes",
    "gpu/bundle_profile.py": "what is carried there, too: programs and the plan of their runs",
    "gpu/profile_templates.py": "runs there, without this package; `tvm-ext database import` takes in what it writes",
    "gpu/import_results.py": "asks `require_clean_commit` for the commit of the bundle",
}
# What several scripts have in common, and what their text names in place of `write_results`.
SHARED = {"_metaschedule.py": "measure_each"}
# What writes something else beside its results.
BESIDE = {
    "attention.py": "/proc/self/clear_refs, so that the process's high-water mark begins anew",
    "tuning_metaschedule.py": "what its two sides tell each other, in a folder of their own",
    "metaschedule_model.py": "MetaSchedule's records, in a folder of their own",
    "tuning_measured.py": "which kernels a folder of compiled ones has, beside them",
    "rammer_simulated.py": "pictures of the schedules, where a folder is named for them",
    "_rtask_graphs.py": "graphs of networks, where a folder is named to keep them",
    "trace_model/learner.py": "what it has learnt, where MetaSchedule asks for it",
    "open_shapes.py": "what building took, beside the libraries, where a folder is named to keep them",
    "threads_beside.py": "the limits of a control group that it makes and removes",
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script by its path below ``benchmarks/``; scripts import each other by their bare names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gpu"))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(Path(name).stem, BENCHMARKS / name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    yield load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def _environment(commit: str | None) -> environments.Environment:
    return replace(environments.current_environment(), commit=commit, threads=1, date="2001-02-03T04:05:06+00:00")


@pytest.mark.parametrize("commit", [DIRTY, None, ""])
def test_no_result_of_the_repository_without_a_clean_commit(
    commit: str | None, script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = script("_common.py")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    environment = _environment(commit)
    for path in (None, tmp_path / "results" / "mine.json", tmp_path / "results" / ".." / "results" / "mine.json"):
        with pytest.raises(common.DirtyTreeError, match=r"is not written to .*results.*\n  remedy: commit"):
            common.result_path("rows", environment, path)
    with pytest.raises(common.DirtyTreeError):
        common.write_results(tmp_path / "results" / "mine.json", "rows", environment, [])
    assert not (tmp_path / "results").exists()
    elsewhere = tmp_path / "mine.json"
    common.write_results(common.result_path("rows", environment, elsewhere), "rows", environment, [{"a": 1}])
    assert f'"commit": {"null" if commit is None else chr(34) + commit + chr(34)}' in elsewhere.read_text()


def test_a_clean_commit_writes_its_results(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = script("_common.py")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    path = common.result_path("rows", _environment(CLEAN))
    assert path == tmp_path / "2001-02-03-rows.json"
    common.write_results(path, "rows", _environment(CLEAN), [{"a": 1}])
    assert common.earlier_results(path, _environment(CLEAN)) == [{"a": 1}]
    assert common.earlier_results(tmp_path / "absent.json", _environment(CLEAN)) == []
    with pytest.raises(common.DirtyTreeError, match="measured from commit 0123456789ab, not aaaa"):
        common.earlier_results(path, _environment("aaaa"))


def test_the_repository_keeps_summaries_and_other_files_all_samples(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = script("_common.py")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    samples = [float(item) for item in range(20)]
    record = {
        "id": "a",
        "timings": [{"samples_s": samples}],
        "samples": {"ours": [2.0, 1.0]},
        "programs": [{}, {}],
        "plan": {"stages": 3},
        "time_s": 0.123456789,
    }
    inside, outside = tmp_path / "results" / "mine.json", tmp_path / "mine.json"
    for path in (inside, outside):
        common.write_results(path, "rows", _environment(CLEAN), [record])
    assert common.earlier_results(outside, _environment(CLEAN)) == [record]
    (brief,) = common.earlier_results(inside, _environment(CLEAN))
    assert brief["timings"] == [{"samples_s": {"count": 20, "least": 0.0, "median": 9.5, "p90": 18.0}}]
    assert brief["time_s"] == 0.12346 and "plan" not in brief
    assert brief["samples"]["ours"]["median"] == 1.5 and brief["programs"] == {"count": 2}
    assert common.median_of(brief["timings"][0]["samples_s"]) == common.median_of(samples) == 9.5
    common.write_results(inside, "rows", _environment(CLEAN), [brief])
    assert common.earlier_results(inside, _environment(CLEAN)) == [brief], "a run that goes on keeps what is there"


MAINS: dict[str, dict[str, Any]] = {
    "ablation.py": {}, "compile_time.py": {}, "construct.py": {}, "matmul.py": {}, "metaschedule.py": {},
    "metaschedule_model.py": {}, "model_quality.py": {}, "models.py": {}, "operators.py": {}, "rows.py": {},
    "packed_products.py": {}, "gpu/ablation.py": {},
    "attention.py": {}, "persistent.py": {}, "rammer.py": {}, "rammer_runtime.py": {}, "rammer_simulated.py": {},
    "rammer_cells.py": {},
    "winograd.py": {}, "drawn.py": {}, "exported.py": {}, "memory.py": {}, "open_shapes.py": {}, "open_lengths.py": {},
    "gpu/chains.py": {}, "gpu/heuristics.py": {}, "gpu/interpret.py": {}, "gpu/templates.py": {},
    "gpu/models.py": {}, "gpu/pipelining.py": {}, "gpu/pipelining_model.py": {},
    "gpu/pipelining_networks.py": {}, "gpu/sweep.py": {"compile": False},
    "gpu/schedules.py": {}, "threads_beside.py": {},
    "tuning.py": {}, "tuning_curves.py": {}, "tuning_metaschedule.py": {},
    "tuning_measured.py": {"output": BENCHMARKS / "results" / "mine.json"},
}  # fmt: skip


@pytest.mark.parametrize("name", MAINS)
def test_every_script_refuses_before_it_measures(
    name: str, script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script(name)
    monkeypatch.setattr(module, "current_environment", lambda: _environment(DIRTY))
    if hasattr(module, "progress"):
        monkeypatch.setattr(module, "progress", lambda: pytest.fail("it has begun to measure"))
    with pytest.raises(sys.modules["_common"].DirtyTreeError, match="the sources differ from commit 0123456789ab"):
        module.main(**MAINS[name])


def test_an_unknown_operator_is_refused(script: Callable[[str], ModuleType]) -> None:
    with pytest.raises(InputError, match="there is no operator 'C99'"):
        script("operators.py").chosen_ids(["C99"])


def test_one_command_measures_everything(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("everything.py")
    commands = [command for group in module.COMMANDS.values() for command in group]
    assert {command.split()[0] for command in commands} == set(MAINS)
    for command in commands:
        name, *arguments = command.split()
        app = typer.Typer(add_completion=False)
        app.command()(script(name).main)
        typer.main.get_command(app).make_context(name, arguments)  # raises for an option that is not there
    ran: list[str] = []
    monkeypatch.setattr(module, "run", lambda command: ran.append(command) or int(command == "matmul.py"))
    monkeypatch.setattr(module, "current_environment", lambda: _environment(DIRTY))
    with pytest.raises(sys.modules["_common"].DirtyTreeError):
        module.main()
    assert ran == []
    monkeypatch.setattr(module, "current_environment", lambda: _environment(CLEAN))
    with pytest.raises(typer.Exit) as ended:
        module.main()
    assert ran == commands and ended.value.exit_code == 1


def test_no_script_is_left_out() -> None:
    found = {str(path.relative_to(BENCHMARKS)): path.read_text(encoding="utf-8") for path in BENCHMARKS.rglob("*.py")}
    marks = ("write_results", *SHARED.values())
    writing = {name for name, text in found.items() if any(mark in text for mark in marks)}
    assert writing - set(WRITERS) - set(SHARED) == set(MAINS)
    others = {name for name, text in found.items() if _writes_files(ast.parse(text))}
    assert others == {*WRITERS, *BESIDE}, "a script writes a file past `write_results`"


def _writes_files(tree: ast.AST) -> bool:
    """Whether it calls one of the functions that write whole files, or opens one with a mode."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls}
    modes = [call.args[0] for call in calls if getattr(call.func, "attr", "") == "open" and call.args]
    opened = any(isinstance(mode, ast.Constant) and mode.value in ("a", "w") for mode in modes)
    return opened or bool(names & {"write_atomically", "write_text", "write_bytes", "dump"})


def test_a_result_of_a_bundle_states_its_clean_commit(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("gpu/import_results.py")
    common = sys.modules["_common"]
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    results = tmp_path / "results.jsonl"
    results.write_text(
        '{"bundle": "b", "commit": "0123456789ab+", "device": "H200", "constructed_for": "nvidia-h200", "id": "a",'
        ' "group": "g", "contenders": {"ours": {"state": "ok", "median_us": 1.0}}}\n'
    )
    with pytest.raises(common.DirtyTreeError):
        module.main(results, tmp_path / "results")
    module.main(results, tmp_path / "elsewhere")
    assert list((tmp_path / "elsewhere").iterdir())


# --- what a clean tree is -------------------------------------------------------------------------------------------
@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("tvm_ext/a.py", "benchmarks/results/old.json", "docs/results.md", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    (tmp_path / ".gitignore").write_text("*.o\n")
    who = ("-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false")
    for arguments in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True, timeout=30)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("tvm_ext/a.py", False), ("tvm_ext/new.py", False), ("benchmarks/new.py", False), ("setup.cfg", False),
        ("benchmarks/results/old.json", True), ("benchmarks/results/new.json", True), ("docs/plot.png", True),
        ("README.md", True), ("tvm_ext/built.o", True),
    ],
)  # fmt: skip
def test_changes_that_are_no_results_make_a_tree_dirty(checkout: Path, name: str, clean: bool) -> None:
    head = environments._commit(checkout)
    assert environments.is_clean(head) and len(str(head)) == 12
    (checkout / name).write_text("two\n")
    assert environments._commit(checkout) == (head if clean else f"{head}+")


def test_without_git_there_is_no_commit(tmp_path: Path) -> None:
    assert environments._commit(tmp_path) is None
    assert not environments.is_clean(None)
