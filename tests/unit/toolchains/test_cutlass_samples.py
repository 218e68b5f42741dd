"""Sample programs: made, kept, linked, and run by the worker, with kernels of plain C++ in place of a GPU's."""

from __future__ import annotations

import math
import re
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cutlass_on_cpu import put_on_cpu
from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.fake_gpu import FakePrograms
from tests.unit.byoc_cutlass.graphs import convolution, decided, op, partition, product
from tests.unit.compilers import needs_cc, needs_nvcc
from tvm_ext import relay
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.byoc_cutlass.emit import GEMM_CALL
from tvm_ext.byoc_cutlass.emit_back_to_back import PAIR_CALL
from tvm_ext.byoc_cutlass.emit_convolution import CONVOLUTION_CALL
from tvm_ext.byoc_cutlass.profiler import launch_of, plan_region
from tvm_ext.byoc_cutlass.screening import SampleLaunch, ScreeningLimits
from tvm_ext.byoc_cutlass.selection import candidates_of
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.partition import PARTITION, CutlassPartition, CutlassRegion
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.pair_products import PairProducts
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.toolchains import cutlass_samples, cutlass_toolchain, sample_worker
from tvm_ext.toolchains.cutlass_codegen import CutlassBackend
from tvm_ext.toolchains.cutlass_samples import SamplePrograms, link_samples, sample_versions
from tvm_ext.toolchains.sample_runner import SampleRunner

A100 = lookup("nvidia-a100")
LIMITS = ScreeningLimits(templates=2, finalists=1, variants=2, screening_runs=2, final_runs=2)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("samples")
    with pytest.MonkeyPatch.context() as patch:
        put_on_cpu(patch, folder)
        patch.setattr(cutlass_samples, "why_no_gpu", lambda _device: "")
        patch.setattr(CutlassBackend, "require", lambda _self: None)
        yield folder


def plan(mod: Any, store: Any) -> Any:
    (region,) = decided(mod).taken
    return plan_region(region, candidates_of(region, A100), A100, sample_versions(), store)


@needs_cc
def test_programs_are_made_once_run_and_chosen_by(on_cpu: Path, tmp_path: Path) -> None:
    """All but the device: the library is linked, its entry points called with packed arguments, times come back."""
    store, cache = MeasurementDatabase(tmp_path / "m.db"), KernelCache(tmp_path / "cache")
    plans = [plan(product((64, 32), (32, 48)), store), plan(convolution(), store)]
    done = cutlass_samples.profile_on_gpu(plans, A100, cache, store, LIMITS)
    assert (done.measured_regions, done.failed_programs, done.note) == (2, (), "")
    assert done.launches >= 4 and all(item.trial.outcome == "ok" for item in store.measurements())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutlass_toolchain, "compile_gemm", None)  # another process, another database: nothing is compiled
        again = SamplePrograms(cache, tmp_path)
        wanted = {item.call.symbol: item for one in plans for item in one.tried(LIMITS)}
        assert all(again.is_ready(item) for item in wanted.values())
        assert again.prepare(wanted) == {} and again.compiled == 0
    (region,) = decided(product((64, 32), (32, 48))).taken
    kernels, _ = CutlassBackend(A100, KernelCache(None), store=store).kernels({"region": region})
    best = min(item.time_us for item in store.verdicts(plans[0].workload).values() if item.time_us is not None)
    assert kernels["region"].measured_us == best
    assert f"measured {best:.1f} us" in str(kernels["region"])


@needs_cc
def test_a_build_measures_and_says_so(on_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass_samples, "ScreeningLimits", lambda: LIMITS)
    settings = {"enable_cutlass": True, "kernel_cache": "off", "database": str(tmp_path / "m.db")}
    mod = product((64, 32), (32, 48))
    first = relay.build(mod, "nvidia-a100", profile_cutlass=True, **settings).report
    assert first.cutlass is not None and first.cutlass.profile is not None
    assert first.cutlass.profile.launches >= 2 and f"profile: {first.cutlass.profile}" in str(first)
    later = relay.build(mod, "nvidia-a100", **settings).report.cutlass
    assert later is not None and later.profile is None
    assert later.kernels[0].measured_us == first.cutlass.kernels[0].measured_us is not None


@needs_cc
def test_without_a_gpu_the_model_ranks_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_cpu(monkeypatch, tmp_path)
    monkeypatch.setattr(CutlassBackend, "require", lambda _self: None)
    monkeypatch.setattr(cutlass_samples, "why_no_gpu", lambda _device: "there is no NVIDIA driver")
    settings = {"enable_cutlass": True, "kernel_cache": "off", "database": str(tmp_path / "m.db")}
    report = relay.build(product((64, 32), (32, 48)), "nvidia-a100", profile_cutlass=True, **settings).report
    assert "nothing was measured: there is no NVIDIA driver. Templates are ranked by the model" in str(report)
    assert not (tmp_path / "m.db").exists()


BAD = """
#include <cstdint>
#include <unistd.h>
#define PROGRAM(name, bytes, body) \\
  extern "C" int64_t name##_workspace_bytes(void const*) { return bytes; } \\
  extern "C" int32_t name(int64_t const* call, void* workspace, int64_t size, void*) { body }
PROGRAM(good, 64, return workspace != nullptr && size == 64 && call[0] == 7 ? 0 : 9;)
PROGRAM(refuses, -1, return 0;)
PROGRAM(fails, 0, return 7;)
PROGRAM(crashes, 0, *static_cast<int volatile*>(nullptr) = 1; return 0;)
PROGRAM(hangs, 0, for (;;) sleep(1);)
"""


def launch(symbol: str) -> SampleLaunch:
    arguments = {
        "symbol": symbol,
        "packing": GEMM_CALL.packing,
        "numbers": [7, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0],
        "factors": [0, 1],
        "operands": [],
        "distances": [],
        "buffers": [{"bytes": 100, "dtype": "float16"}, {"bytes": 100, "dtype": "int8"}, {"bytes": 8, "dtype": "int8"}],
    }
    return SampleLaunch(symbol, symbol, 1.0, arguments)


@pytest.fixture(scope="module")
def bad(on_cpu: Path) -> Path:
    (on_cpu / "bad.cc").write_text(BAD)
    subprocess.run(["g++", "-c", "-fPIC", "-o", "bad.o", "bad.cc"], cwd=on_cpu, check=True)
    link_samples([(on_cpu / "bad.o").read_bytes()], on_cpu / "bad.so")
    return on_cpu / "bad.so"


@needs_cc
def test_what_crashes_or_hangs_costs_itself_only(bad: Path) -> None:
    names = ("good", "refuses", "crashes", "fails", "hangs", "absent")
    with closing(SampleRunner(dict.fromkeys(names, bad), limit_s=1.0)) as runner:
        done = {item.launch.symbol: item for item in runner.time([launch(name) for name in names], 3)}
        assert {name: item.outcome for name, item in done.items()} == {
            "good": "ok", "refuses": "launch_failed", "crashes": "crashed", "fails": "launch_failed",
            "hangs": "timed_out", "absent": "launch_failed",
        }  # fmt: skip
        assert len(done["good"].times_us) == 3 and all(map(math.isfinite, done["good"].times_us))
        assert "refuses the extents" in done["refuses"].reason and "status 7" in done["fails"].reason
        assert "signal" in done["crashes"].reason or "-11" in done["crashes"].reason
        assert runner.started > 2
        assert runner.time([launch("good")], 2)[0].outcome == "ok"  # and the next one works


@needs_cc
def test_a_library_that_does_not_load_is_a_failed_launch(bad: Path, tmp_path: Path) -> None:
    (tmp_path / "rubbish.so").write_bytes(b"rubbish")
    with closing(SampleRunner({"one": tmp_path / "rubbish.so", "good": bad})) as runner:
        first, second = runner.time([launch("one"), launch("good")], 1)
    assert (first.outcome, second.outcome) == ("launch_failed", "ok")


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_buffers_hold_finite_numbers(dtype: str) -> None:
    block = sample_worker.random_block(dtype, 50_000)
    assert len(block) >= 50_000 and len(set(block)) > 20
    if dtype in ("float16", "float32"):
        assert np.isfinite(np.frombuffer(block, dtype)).all()
    elif dtype == "bfloat16":
        wide = np.frombuffer(block, np.uint16).astype(np.uint32) << 16
        assert np.isfinite(wide.view(np.float32)).all()
    elif dtype != "int8":  # all ones in the exponent are infinities or no numbers
        assert not any(value & 0x40 for value in block)


def test_calls_are_packed_as_the_structures_are_declared() -> None:
    """Products have nine numbers of 64 bits and four of 32; convolutions twenty of 32; pairs seven and fourteen."""
    for form in (GEMM_CALL, CONVOLUTION_CALL, PAIR_CALL):
        assert form.declaration.startswith(f"struct {form.name} {{")
        lines = [line.split("//")[0].strip() for line in form.declaration.splitlines()[1:-1]]
        wide = sum(line.count(",") + 1 for line in lines if line.startswith("int64_t ") and "*" not in line)
        narrow = sum(line.count(",") + 1 for line in lines if line.startswith("int32_t"))
        assert struct.calcsize(form.packing) == 8 * wide + 4 * narrow
        assert ("operand_batches" in form.declaration) == form.has_distances


@pytest.mark.parametrize("kind", ["a product", "a convolution", "two products"])
def test_a_launch_has_the_numbers_and_factors_of_its_structure(kind: str) -> None:
    (region,) = {
        "a product": lambda: decided(product((64, 32), (32, 48))).taken,
        "a convolution": lambda: decided(convolution()).taken,
        "two products": lambda: paired(layers((48, 24), (32, 24), (16, 32))),
    }[kind]()
    call = candidates_of(region, A100)[0].call
    factors = re.search(r"void const (\*a, .*);", call.form.declaration)
    assert factors is not None and len(factors[1].split(",")) == len(call.factors)
    assert struct.pack(call.form.packing, *call.numbers)


def test_the_launch_of_a_region_has_its_numbers(on_cpu: Path) -> None:
    (region,) = decided(product((64, 32), (32, 48))).taken
    arguments = launch_of(candidates_of(region, A100)[0], region).arguments
    assert isinstance(arguments["numbers"], list)
    assert arguments["numbers"][:4] == [64, 48, 32, 1]
    assert FakePrograms().prepare({}) == {}


PAIRS = {"products": lambda: layers((48, 24), (32, 24), (16, 32)), "a convolution": lambda: convolved_layers()}


def layers(x: tuple[int, ...], w: tuple[int, ...], v: tuple[int, ...]) -> Any:
    """Two linear layers, a bias and an activation behind each."""
    inputs = inputs_of(x, w, (w[0],), v, (v[0],), dtype="float16")
    first = op.nn.gelu(op.add(op.matmul(inputs[0], op.permute_dims(inputs[1])), inputs[2]))
    return module_of(inputs, op.nn.relu(op.add(op.matmul(first, op.permute_dims(inputs[3])), inputs[4])))


def convolved_layers() -> Any:
    inputs = inputs_of((2, 9, 8, 16), (32, 3, 3, 16), (32,), (16, 1, 1, 32), (2, 9, 8, 16), dtype="float16")
    x, w, b, v, r = inputs
    layout = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
    first = op.nn.relu(op.add(op.nn.conv2d(x, w, padding=1, **layout), b))
    return module_of(inputs, op.add(op.nn.conv2d(first, v, **layout), r))


def paired(mod: Any) -> Sequence[CutlassRegion]:
    """The module's regions, where products are paired."""
    backend = CutlassBackend(A100, KernelCache(None))
    made = PairProducts(A100, backend, lambda _mod: None, True)(partition(mod)[0])
    return from_json(CutlassPartition, str(made.attrs[PARTITION])).taken


@needs_cc
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", PAIRS)
def test_two_products_in_one_kernel_are_measured_as_one(kind: str, on_cpu: Path, tmp_path: Path) -> None:
    """Their sample programs compute what the operators do, on buffers that the launch describes."""
    store = MeasurementDatabase(tmp_path / "m.db")
    (region,) = paired(PAIRS[kind]())
    assert region.then is not None
    made = plan_region(region, candidates_of(region, A100), A100, sample_versions(), store)
    done = cutlass_samples.profile_on_gpu([made], A100, KernelCache(tmp_path / "cache"), store, LIMITS)
    assert (done.measured_regions, done.failed_programs, done.note) == (1, (), "")
    assert done.launches >= 2 and all(item.trial.outcome == "ok" for item in store.measurements())
    kernels, _ = CutlassBackend(A100, KernelCache(None), store=store).kernels({"region": region})
    assert kernels["region"].measured_us is not None and kernels["region"].products == 2
    alone = plan_region(replace(region, then=None), (), A100, sample_versions(), store)
    assert alone.workload != made.workload and not alone.verdicts


def test_this_machine_says_whether_it_has_a_gpu() -> None:
    text = cutlass_samples.why_no_gpu(A100)
    assert text == "" or "driver" in text or "GPU" in text


@needs_nvcc
@pytest.mark.slow
def test_a_real_program_compiles_for_sm_80_and_loads(tmp_path: Path) -> None:
    """nvcc's own: everything but the device. Without one, CUDA says so and the worker goes on."""
    (region,) = decided(product((256, 128), (128, 256))).taken
    best = candidates_of(region, A100)[0]
    programs = SamplePrograms(KernelCache(None), tmp_path)
    assert programs.prepare({best.call.symbol: best}) == {}
    with closing(SampleRunner(programs.libraries)) as runner:
        (done,) = runner.time([launch_of(best, region)], 2)
    assert done.outcome == "ok" or done.reason.startswith("LaunchError: cudaMalloc: "), done.reason
    assert "undefined symbol" not in done.reason
