"""`BuildOptions`, and everything that is read from the environment."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from tvm_ext import _native, core_count, options
from tvm_ext._autoload import register_config_options
from tvm_ext._native import OPTIONS_LIBRARY
from tvm_ext._tvm import PassContext
from tvm_ext.errors import OptionError
from tvm_ext.options import BuildOptions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def native_options() -> None:
    if not register_config_options():
        pytest.skip("the native part is not built here (a source checkout that is not installed)")


def test_defaults_are_the_papers() -> None:
    built = BuildOptions()
    assert (built.enable_roller, built.candidates, built.epsilon, built.device) == (True, 10, 0.0, None)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("enable_roller", "yes", 'True, False or "auto"'),
        ("enable_roller", 1, 'True, False or "auto"'),
        ("enable_roller", None, 'True, False or "auto"'),
        ("enable_pipelining", 1, 'True, False or "auto"'),
        ("enable_persistent_fusion", "on", 'True, False or "auto"'),
        ("enable_persistent_fusion", 0, 'True, False or "auto"'),
        ("candidates", 0, "a whole number from 1 to 1000"),
        ("candidates", True, "a whole number from 1 to 1000"),
        ("candidates", 2.5, "a whole number from 1 to 1000"),
        ("epsilon", -0.1, "a number from 0 to 1"),
        ("epsilon", float("nan"), "a number from 0 to 1"),
        ("epsilon", "0.4", "a number from 0 to 1"),
        ("device", "", "a device"),
        ("device", 7, "a device"),
        ("profile_cutlass", "yes", 'True, False or "auto"'),
        ("database", "", "the name of a file"),
        ("database", 3, "the name of a file"),
        ("num_threads", 0, "a whole number from 1 to 4096"),
    ],
)
def test_wrong_values_name_the_option_and_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(OptionError, match=f"option '{name}'.*{re.escape(allowed)}"):
        BuildOptions.create(**{name: value})


SWITCHES = [item.name for item in dataclasses.fields(BuildOptions) if item.type == options._SWITCH]


def test_all_switches_are_known_as_such() -> None:
    assert set(SWITCHES) == {name for name in BuildOptions.names() if name.startswith(("enable_", "profile_"))}
    for switch in SWITCHES:
        with pytest.raises(OptionError, match=switch):
            BuildOptions.create(**{switch: "on"})


@pytest.mark.parametrize("value", [True, False, "auto"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_take_their_three_values(switch: str, value: object) -> None:
    assert getattr(BuildOptions.create(**{switch: value}), switch) == value


def test_unknown_names_get_the_nearest_known_one() -> None:
    with pytest.raises(OptionError, match="no build option called 'candidate'") as caught:
        BuildOptions.create(candidate=3)
    assert "did you mean 'candidates'" in caught.value.remedy
    with pytest.raises(OptionError) as caught:
        BuildOptions().updated(zzzz=3)
    assert "did you mean" not in caught.value.remedy
    assert "epsilon" in caught.value.remedy


def test_options_come_from_the_pass_context_and_arguments_win() -> None:
    config = {"tvm_ext.candidates": 4, "tvm_ext.epsilon": 0.4, "relax.fallback_device_type": 1}
    assert BuildOptions.from_config(config) == BuildOptions(candidates=4, epsilon=0.4)
    assert BuildOptions.from_config(config).updated(candidates=5).candidates == 5
    assert BuildOptions.current(candidates=2) == BuildOptions(candidates=2)


def test_native_keys_are_the_options() -> None:
    source = (ROOT / "tvm_ext" / "csrc" / "pass_config.cc").read_text()
    registered = re.findall(r'^  Register\w*(?:<\w+>)?\("tvm_ext\.(\w+)"', source, re.MULTILINE)
    assert sorted(registered) == sorted(BuildOptions.names())


@pytest.mark.usefixtures("native_options")
def test_pass_context_is_read_typed() -> None:
    config = {"tvm_ext.enable_roller": "auto", "tvm_ext.candidates": 3, "tvm_ext.epsilon": 1, "tvm_ext.device": "v100"}
    with PassContext(config=config):
        assert BuildOptions.current() == BuildOptions(enable_roller="auto", candidates=3, epsilon=1.0, device="v100")
        assert BuildOptions.current(device=None).device is None
    assert BuildOptions.current() == BuildOptions()


@pytest.mark.usefixtures("native_options")
@pytest.mark.parametrize(
    ("key", "value"),
    [("enable_roller", "aut"), ("candidates", "3"), ("candidates", 2.5), ("epsilon", "x"), ("device", 3)],
)
def test_pass_context_refuses_wrong_types_and_says_where(key: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"tvm_ext.{key} takes"):
        PassContext(config={f"tvm_ext.{key}": value})


@pytest.mark.usefixtures("native_options")
def test_pass_context_refuses_misspelt_keys() -> None:
    with pytest.raises(AttributeError, match=r"tvm_ext\.candidate\b"):
        PassContext(config={"tvm_ext.candidate": 3})


def test_an_installed_package_has_its_native_part() -> None:
    from tvm_ext._environment import installed_version

    if installed_version("tvm-ext") is None:
        pytest.skip("the package is not installed: a source checkout")
    assert _native.library_path(OPTIONS_LIBRARY) is not None


def test_cache_directory_follows_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path / "new"))
    assert options.cache_directory() == tmp_path / "new"
    assert not (tmp_path / "new").exists()
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", "  ")
    assert options.cache_directory().name == "tvm_ext"
    (tmp_path / "file").touch()
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(OptionError, match="not a folder"):
        options.cache_directory()


@pytest.fixture
def no_threads_set(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "TVM_EXT_CHOSEN_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # remembered, so that what the code sets is undone
        monkeypatch.delenv(name)
    return monkeypatch


def test_threads_are_the_usable_cores(no_threads_set: pytest.MonkeyPatch) -> None:
    no_threads_set.setattr(options, "usable_core_count", lambda: 5)
    assert options.configure_threads() == 5
    assert os.environ["TVM_NUM_THREADS"] == "5"


@pytest.mark.parametrize("name", ["TVM_NUM_THREADS", "OMP_NUM_THREADS"])
def test_threads_that_the_user_set_stand(name: str, no_threads_set: pytest.MonkeyPatch) -> None:
    no_threads_set.setenv(name, "3")
    assert options.configure_threads() is None
    assert os.environ.get("TVM_NUM_THREADS") == ("3" if name == "TVM_NUM_THREADS" else None)


def test_a_child_with_fewer_cores_chooses_anew(no_threads_set: pytest.MonkeyPatch) -> None:
    no_threads_set.setattr(options, "usable_core_count", lambda: 4)
    assert options.configure_threads() == 4
    no_threads_set.setattr(options, "usable_core_count", lambda: 1)  # the child, pinned to one core
    assert options.configure_threads() == 1
    no_threads_set.setenv("TVM_NUM_THREADS", "2")  # set in between by the user
    assert options.configure_threads() is None


def test_usable_cores_respect_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    for quota, cores in [(None, 8), (1.5, 2), (0.2, 1), (16.0, 8)]:
        monkeypatch.setattr(core_count, "_control_group_cores", lambda _membership, _root, quota=quota: quota)
        assert options.usable_core_count() == cores


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/../x\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("4:cpu,cpuacct:/c\n", {"cpu/c/cpu.cfs_quota_us": "300000\n", "cpu/c/cpu.cfs_period_us": "100000\n"}, 3.0),
        ("4:cpu:/c\n", {"cpu/c/cpu.cfs_quota_us": "-1\n", "cpu/c/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/\n", {"cpu.max": "what\n"}, None),
        ("", {}, None),
    ],
)
def test_control_group_quota(tmp_path: Path, membership: str, files: dict[str, str], cores: float | None) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert core_count._control_group_cores(tmp_path / "membership", tmp_path / "root") == cores
