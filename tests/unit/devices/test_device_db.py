"""The device tables: every number has its source, names and targets find their row, mistakes are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tvm_ext._tvm import Target
from tvm_ext.devices import device_db
from tvm_ext.devices.cpu_info import read_cpu_info
from tvm_ext.devices.device_facts import LayerText, fact, spec_from_facts, with_facts, with_unit_count
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.probe import isa_of
from tvm_ext.devices.row_files import write_row
from tvm_ext.devices.rows import cpus
from tvm_ext.devices.rows.recorded_cpus import RECORDED_ROWS
from tvm_ext.errors import TargetError

TEXT_FIELDS = {
    "name",
    "kind",
    "description",
    "aliases",
    "target",
    "facts",
    "layers",
    "peak_gflops",
    "instruction_gops",
    "function_cycles",
    "row_shares",
}
X86_CPUS = [row.name for row in device_db.ROWS if row.kind == "cpu" and "mtriple" not in dict(row.target)]
ROW_IDS = [row.name for row in device_db.ROWS]
HAS_AVX512 = read_cpu_info().machine == "x86_64" and isa_of(read_cpu_info()) is cpus.AVX512


def _numbers(spec: DeviceSpec) -> Iterator[tuple[str, Any]]:
    """Every number of ``spec`` with its dotted path, found by walking the fields and not the facts."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name not in TEXT_FIELDS and value is not None:
            yield field.name, value
    for layer in spec.layers:
        for field in dataclasses.fields(layer):
            value = getattr(layer, field.name)
            if field.name not in {"name", "description", "scope"} and value is not None:
                yield f"layers.{layer.name}.{field.name}", value
    for name in ("peak_gflops", "instruction_gops", "function_cycles", "row_shares"):
        for key, value in getattr(spec, name):
            yield f"{name}.{key}", value


def _parsed(value: object) -> object:
    if isinstance(value, str):
        return tuple(int(part) for part in value.replace("x", ".").split("."))
    return value


@pytest.mark.parametrize("row", device_db.ROWS, ids=ROW_IDS)
def test_every_number_has_one_used_fact_with_unit_and_source(row: DeviceSpec) -> None:
    used = [item for item in row.facts if item.used]
    values = {item.field: _parsed(item.value) for item in used}
    assert len(values) == len(used)
    assert dict(_numbers(row)) == values
    assert all(item.unit and item.source for item in row.facts)


@pytest.mark.parametrize("row", device_db.ROWS, ids=ROW_IDS)
def test_overruled_sources_differ_from_the_used_one(row: DeviceSpec) -> None:
    used = {item.field: item.value for item in row.facts if item.used}
    for item in row.facts:
        if not item.used:
            assert item.value != used.get(item.field), item


@pytest.mark.parametrize("row", device_db.ROWS, ids=ROW_IDS)
def test_rows_describe_a_hierarchy(row: DeviceSpec) -> None:
    registers, *memories = row.layers
    assert registers.capacity_bytes == row.register_limit * row.register_bytes
    assert registers.bandwidth_gb_per_s is None
    assert row.lowest_layer.capacity_bytes is None
    assert all(layer.bandwidth_gb_per_s for layer in memories)
    capacities = [layer.capacity_bytes for layer in row.layers if layer.capacity_bytes]
    assert capacities == sorted(capacities)
    assert row.peak_gflops_of("float32")
    if row.kind == "cpu":  # arithmetic: GB/s falls from layer to layer
        rates = [layer.bandwidth_gb_per_s or 0.0 for layer in memories]
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("name", "units", "teus", "lanes", "registers", "l1_bytes", "bank_bytes", "transaction_bytes"),
    [
        ("nvidia-v100", 80, 4, 32, 96, 48 * 1024, 4, 32),
        ("nvidia-k80", 13, 4, 32, 96, 48 * 1024, 8, 32),
        ("amd-mi50", 60, 4, 64, 70, 64 * 1024, 4, 64),
        ("graphcore-ipu", 1216, 1, 2, 10, 256 * 1024, None, 4),
    ],
)
def test_rows_agree_with_section_4_of_the_paper(
    name: str,
    units: int,
    teus: int,
    lanes: int,
    registers: int,
    l1_bytes: int,
    bank_bytes: int | None,
    transaction_bytes: int,
) -> None:
    row = device_db.lookup(name)
    scratchpad = row.layer("L1")
    assert (row.unit_count, row.teus_per_unit, row.teu_lanes, row.register_limit) == (units, teus, lanes, registers)
    assert (scratchpad.capacity_bytes, scratchpad.bank_bytes) == (l1_bytes, bank_bytes)
    assert row.layer("L2").transaction_bytes == transaction_bytes


def test_names_and_aliases_are_unique() -> None:
    names = [name for row in device_db.ROWS for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)
    assert not set(names) & set(device_db.HOST_NAMES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("V100", "nvidia-v100"),
        ("nvidia/nvidia-a100", "nvidia-a100"),
        (" NVIDIA-H200 ", "nvidia-h200"),
        ("Tesla-K80", "nvidia-k80"),
        ("mi50", "amd-mi50"),
        ("IPU", "graphcore-ipu"),
        ("avx2", "cpu-avx2"),
    ],
)
def test_lookup_by_name_and_alias(name: str, expected: str) -> None:
    assert device_db.lookup(name).name == expected


def test_lookup_of_every_name() -> None:
    assert [device_db.lookup(name).name for name in device_db.names()] == list(device_db.names())


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("nvidia-v10", "nvidia-v100"), ("h20", "h200"), ("cpu-avx", "cpu-avx2")]
)
def test_lookup_suggests_the_nearest_names(wrong: str, nearest: str) -> None:
    with pytest.raises(TargetError, match="no device called") as caught:
        device_db.lookup(wrong)
    assert nearest in caught.value.remedy


@pytest.mark.parametrize(
    ("target", "device", "attribute", "value"),
    [
        ("v100", "nvidia-v100", "arch", "sm_70"),
        ({"kind": "cuda", "arch": "sm_75"}, "nvidia-t4", "arch", "sm_75"),
        ({"kind": "cuda", "arch": "sm_90"}, "nvidia-h100", "arch", "sm_90"),
        ("nvidia/nvidia-a100", "nvidia-a100", "arch", "sm_80"),
        ("nvidia-h200", "nvidia-h200", "arch", "sm_90a"),
        ({"kind": "rocm", "mcpu": "gfx906"}, "amd-mi50", "mcpu", "gfx906"),
        ({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}, "cpu-neon", "mcpu", "neoverse-n1"),
        ("cpu-avx2", "cpu-avx2", "mcpu", "x86-64-v3"),
        ("sse", "cpu-sse2", "mcpu", "x86-64"),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "core2"}, "cpu-sse2", "mcpu", "core2"),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sandybridge"}, "cpu-sse2", "mcpu", "sandybridge"),
        ({"kind": "llvm", "mtriple": "amd64-pc-linux", "mcpu": "x86-64-v2"}, "cpu-sse2", "mcpu", "x86-64-v2"),
    ],
)
def test_device_for_target(target: object, device: str, attribute: str, value: str) -> None:
    spec, resolved = device_db.device_for_target(target)
    assert spec.name == device
    assert str(resolved.attrs[attribute]) == value


def test_opencl_is_a_gpu_without_matrix_units_or_more_local_memory() -> None:
    spec, resolved = device_db.device_for_target({"kind": "opencl"})
    assert (spec.kind, resolved.kind.name) == ("opencl", "opencl")
    assert spec == device_db.lookup("opencl")
    assert spec.tensor_core_shape is None
    assert not [key for key, _ in spec.peak_gflops if key.endswith("_tensor")]
    assert [layer.opt_in_capacity_bytes for layer in spec.layers] == [None] * len(spec.layers)


def test_a_target_object_is_used_as_it_is() -> None:
    target = Target("nvidia/nvidia-h100")
    spec, resolved = device_db.device_for_target(target)
    assert spec.name == "nvidia-h100"
    assert resolved is target


@pytest.mark.usefixtures("this_cpu")
@pytest.mark.parametrize("target", ["llvm", "cpu", {"kind": "llvm"}, Target("llvm")])
def test_plain_llvm_is_this_machine_with_its_features(target: object) -> None:
    spec, resolved = device_db.device_for_target(target)
    assert spec.name == "cpu"
    assert "mcpu" in resolved.attrs
    assert int(resolved.attrs["num-cores"]) == spec.unit_count
    host = read_cpu_info()
    if host.features is not None:
        from tvm_ext._tvm import target_has_feature

        for name in host.checked_features:
            assert bool(target_has_feature(name, resolved)) == (name in host.features), name


def test_what_else_a_plain_llvm_target_says_is_kept() -> None:
    _, resolved = device_db.device_for_target({"kind": "llvm", "fast-math": True, "libs": ["a"]})
    assert resolved.attrs["fast-math"]
    assert list(resolved.attrs["libs"]) == ["a"]
    _, hosted = device_db.device_for_target(Target("llvm", "llvm"))
    assert hosted.host.kind.name == "llvm"


def test_the_number_of_cores_is_honoured() -> None:
    one, target = device_db.device_for_target({"kind": "llvm", "num-cores": 1})
    three, _ = device_db.device_for_target({"kind": "llvm", "num-cores": 3})
    assert (one.unit_count, three.unit_count, int(target.attrs["num-cores"])) == (1, 3, 1)
    assert dict(three.peak_gflops)["float32"] == pytest.approx(3 * dict(one.peak_gflops)["float32"])
    assert three.lowest_layer.bandwidth_gb_per_s == one.lowest_layer.bandwidth_gb_per_s


@pytest.mark.skipif(read_cpu_info().machine != "x86_64", reason="x86-64 instruction sets")
@pytest.mark.parametrize(
    "target",
    [
        {"kind": "llvm", "mcpu": "haswell", "num-cores": 2},
        {"kind": "llvm", "mcpu": "x86-64-v4", "mattr": ["-avx512f"], "num-cores": 2},
        {"kind": "llvm", "mattr": ["+avx2", "+fma"], "num-cores": 2},
    ],
)
@pytest.mark.skipif(not HAS_AVX512, reason="the CPU's own instruction set is AVX2, so it is this machine's row")
def test_an_avx2_target_is_the_avx2_row_on_an_avx512_machine(target: dict[str, Any]) -> None:
    spec, resolved = device_db.device_for_target(target)
    assert (spec.name, spec.unit_count, spec.register_bytes, spec.register_limit) == ("cpu-avx2", 2, 32, 16)
    assert list(resolved.attrs.get("mattr", [])) == target.get("mattr", [])


@pytest.mark.parametrize(
    ("target", "problem", "remedy"),
    [
        ("lvm", "unknown", "'llvm'"),
        ("cudda", "unknown", "'cuda'"),
        ("nvidia/nvidia-a10o", "unknown", "'nvidia/nvidia-a100'"),
        ("nvidia-h20", "unknown", "'nvidia-h200'"),
        ("llvm -mcpu=haswell", "no longer supported", "known names"),
        ("", "unknown", "known names"),
        (5, "unknown", "known names"),
        (None, "unknown", "known names"),
        ({}, "unknown", "known names"),
        ({"kind": "llvm", "mcpuu": "haswell"}, "mcpuu", "correct the named option"),
        ({"kind": "llvm", "num-cores": "two"}, "num-cores", "correct the named option"),
        ({"kind": "llvm", "num-cores": 0}, "num-cores", "from 1 up"),
        ({"kind": "llvm", "mcpu": "hasswell"}, "mcpu 'hasswell'", "'haswell'"),
        ({"kind": "llvm", "mtriple": "riscv64-linux-gnu"}, "is neither a 64-bit x86", "haswell"),
        ({"kind": "llvm", "mtriple": "i686-linux-gnu", "mcpu": "haswell"}, "is neither a 64-bit x86", "x86-64"),
        ({"kind": "llvm", "mcpu": "haswell", "mattr": ["+bogus"]}, "bogus", "mattr"),
        ({"kind": "cuda", "arch": "sm_86"}, "sm_86", "nvidia-a100"),
        ({"kind": "cuda", "arch": "sm_8O"}, "sm_8O", "did you mean 'sm_8"),
        ("sm_8O", "unknown", "'sm_80'"),
        ({"kind": "metal"}, "metal", "cuda"),
        ("ipu", "no code generator", "nvidia-v100"),
        ("gc2", "no code generator", "compile --target graphcore-ipu"),
    ],
)
def test_bad_targets_are_named_with_a_remedy(target: object, problem: str, remedy: str) -> None:
    with pytest.raises(TargetError) as caught:
        device_db.device_for_target(target)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_scaling_to_other_core_counts_changes_what_grows_and_nothing_else() -> None:
    row = device_db.lookup("cpu-avx2")
    two = with_unit_count(row, 2)
    assert two.unit_count == 2
    assert with_unit_count(two, 2) is two
    for layer, scaled in zip(row.layers, two.layers, strict=True):
        assert layer.capacity_bytes == scaled.capacity_bytes
        if layer.bandwidth_gb_per_s is not None and scaled.bandwidth_gb_per_s is not None:
            expected = 1.0 if layer is row.lowest_layer else 2 / 14
            assert scaled.bandwidth_gb_per_s == pytest.approx(layer.bandwidth_gb_per_s * expected)
    assert dict(_numbers(two)).keys() == dict(_numbers(row)).keys()


def test_replacing_registers_recomputes_their_capacity() -> None:
    row = with_facts(device_db.lookup("v100"), [fact("register_limit", 128, "registers", "a test")])
    assert row.layer("L0").capacity_bytes == 512
    assert [item.used for item in row.facts if item.field == "register_limit"].count(True) == 1


def test_describe_prints_units_and_sources() -> None:
    v100 = device_db.lookup("v100")
    used, every = device_db.describe(v100), device_db.describe(v100, every_source=True)
    rows = {row.quantity: row for row in used}
    assert rows["L1 (shared memory) capacity"].value == "48 KiB"
    assert rows["peak float32"].value == "12480 GFLOP/s"
    assert rows["L2 (global memory and L2 cache) bandwidth"].value == "750 GB/s"
    assert "nnfusion" in rows["peak float32"].source
    assert len(every) == len(v100.facts) > len(used)
    assert all(row.used for row in used)


def test_a_field_may_not_have_two_used_facts() -> None:
    facts = [fact("unit_count", 1, "count", "one"), fact("unit_count", 2, "count", "other")]
    with pytest.raises(AssertionError, match="two used facts for unit_count"):
        spec_from_facts(
            name="x", kind="cpu", description="", layers=(LayerText(description="", scope="teu"),), facts=facts
        )


# --- recorded CPUs ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", RECORDED_ROWS, ids=[row.name for row in RECORDED_ROWS])
def test_a_recorded_cpu_stands_for_this_machine(row: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_CPU", row.name.upper())
    spec, target = device_db.device_for_target("llvm")
    assert (spec.name, spec.unit_count, int(target.attrs["num-cores"])) == ("cpu", 2, 2)
    assert str(target.attrs["mcpu"]) == dict(row.target)["mcpu"]
    assert spec.peak_gflops == row.peak_gflops
    assert spec.layers == row.layers
    assert device_db.device_for_target({"kind": "llvm", "num-cores": 1})[0].unit_count == 1


def test_an_unknown_recorded_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_CPU", "cpu-epic-zen5")
    with pytest.raises(TargetError, match="TVM_EXT_CPU is 'cpu-epic-zen5'") as caught:
        device_db.lookup("cpu")
    assert "cpu-epyc-zen5" in caught.value.remedy


@pytest.mark.parametrize("name", X86_CPUS)
@pytest.mark.skipif(read_cpu_info().machine != "x86_64", reason="x86-64 rows")
def test_any_cpus_row_file_stands_for_this_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever somebody calls its layers: the instruction set is the target's."""
    row = device_db.lookup(name)
    layers = tuple(dataclasses.replace(layer, description="renamed") for layer in row.layers)
    write_row(tmp_path / "row.json", dataclasses.replace(row, layers=layers))
    monkeypatch.setenv("TVM_EXT_CPU", str(tmp_path / "row.json"))
    spec, _ = device_db.device_for_target({"kind": "llvm", "mcpu": dict(row.target)["mcpu"]})
    assert (spec.name, spec.register_bytes) == ("cpu", row.register_bytes)
