"""From composite functions to a linked module: launches, host functions and objects, with templates on the CPU.

The kernels are `tests/support/cutlass_on_cpu.py`'s; whatever else is what a build for a GPU has. That the real
templates compile is `tests/unit/byoc_cutlass/test_emit.py`'s and its slow neighbour's to say.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support import cutlass_on_cpu
from tests.support.cutlass_on_cpu import CPU, HostLibrary, put_on_cpu
from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.graphs import op, partition
from tests.unit.compilers import needs_cc
from tvm_ext import relay
from tvm_ext.byoc_cutlass import selection
from tvm_ext.byoc_cutlass.emit import GEMM_CALL
from tvm_ext.byoc_cutlass.host import HostFunction, KernelCall
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import CompileError
from tvm_ext.relay_passes.composites import composite_of, is_composite, region_of, twin_of
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.toolchains import cutlass_toolchain
from tvm_ext.toolchains.cutlass_codegen import CutlassBackend
from tvm_ext.toolchains.cutlass_toolchain import APART, MOST_TOGETHER, link_objects, units_of

pytestmark = needs_cc

Array = np.ndarray[Any, Any]
Step = Callable[..., Any]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    put_on_cpu(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def functions() -> dict[str, Any]:
    """The composite function of every graph."""
    return {name: only_function(graph(), "nvidia-a100") for name, graph in GRAPHS.items()}


@pytest.fixture(scope="module")
def library(functions: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> HostLibrary:
    """All of them in one object file, linked and loaded."""
    folder = tmp_path_factory.mktemp("linked")
    with pytest.MonkeyPatch.context() as patch:
        put_on_cpu(patch, folder)
        return linked(functions, "nvidia-a100", folder)


def only_function(mod: tvm.IRModule, device: str) -> Any:
    cut, _ = partition(mod, device)
    (func,) = [func for _, func in cut.functions_items() if is_composite(func)]
    return func


def drawn(func: Any) -> list[Array]:
    """Values for the parameters of a composite function."""
    rng = np.random.default_rng(3)
    found = []
    for param in composite_of(func).params:
        shape, dtype = [int(extent) for extent in param.ty.shape], str(param.ty.dtype)
        whole = rng.integers(-3, 4, shape) if "int" in dtype else rng.standard_normal(shape) / 2
        found.append(np.ascontiguousarray(whole.astype(dtype)))
    for step in composite_of(func).body.blocks[0].bindings:
        if step.value.op.name == "relax.strided_slice":  # filters that are as wide as whole runs: zeros behind
            place = list(composite_of(func).params).index(step.value.args[0])
            found[place][..., int(step.var.ty.shape[3]) :] = 0
    return found


def symbol(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def linked(functions: dict[str, Any], device: str, folder: Path) -> HostLibrary:
    backend = CutlassBackend(lookup(device), KernelCache(None))
    compiled, why_not = backend.compile({name: region_of(func) for name, func in functions.items()})
    assert not why_not
    host = [
        HostFunction(name=symbol(name), tensor_count=len(functions[name].params) + 1, call=item.candidate.call)
        for name, item in compiled.items()
    ]
    return HostLibrary.load(link_objects(host, [item.kernel.image for item in compiled.values()], "sm_80"), folder)


def run_twin(func: Any, arrays: list[Array]) -> Array:
    module = relay.GraphModule(relay.build(twin_of(func), "llvm"))
    for index, array in enumerate(arrays):
        module.set_input(index, array)
    module.run()
    return np.asarray(module.get_output(0).numpy())


def given(*shape: int, dtype: str = "float16") -> Any:
    return relax.Var("given", relax.TensorType(shape, dtype))


def product(a: tuple[int, ...], b: tuple[int, ...], *steps: Step, dtype: str = "float16", others: Any = ()) -> Any:
    """a @ b with ``steps`` behind it, each of the value so far and ``others``."""
    x, y = inputs_of(a, b, dtype=dtype)
    value = op.matmul(x, y, out_dtype="int32" if dtype == "int8" else None)
    for step in steps:
        value = step(value, *others)
    return module_of([x, y, *others], value)


def turned(second: tuple[int, ...], axes: tuple[int, ...] | None = None) -> Any:
    x, y = inputs_of((24, 32), second, dtype="float16")
    return module_of([x, y], op.matmul(x, op.permute_dims(y, axes)))


def heads() -> Any:
    """Q and K of attention as they lie in the projections: heads between the tokens and their channels."""
    q, k = inputs_of((2, 12, 4, 16), (2, 20, 4, 16), dtype="float16")
    return module_of([q, k], op.matmul(op.permute_dims(q, [0, 2, 1, 3]), op.permute_dims(k, [0, 2, 3, 1])))


def own_residual() -> Any:
    (x,) = inputs_of((32, 32), dtype="float16")
    return module_of([x], op.add(op.matmul(x, op.permute_dims(x)), x))


def scaled_integers() -> Any:
    x, w = inputs_of((24, 32), (48, 32), dtype="int8")
    summed = op.matmul(x, op.permute_dims(w), out_dtype="int32")
    return module_of([x, w], op.multiply(op.astype(summed, "float32"), relax.const(0.125, "float32")))


def convolved(
    data: tuple[int, ...],
    weight: tuple[int, ...],
    *steps: Step,
    dtype: str = "float16",
    others: Any = (),
    **options: Any,
) -> Any:
    """An NHWC convolution with ``steps`` behind it, each of the value so far and ``others``."""
    x, w = inputs_of(data, weight, dtype=dtype)
    value = op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="OHWI", **options)
    for step in steps:
        value = step(value, *others)
    return module_of([x, w, *others], value)


def planes(
    shape: tuple[int, ...], filters: tuple[int, ...], *, dtype: str = "float16", last: bool = False, **options: Any
) -> Any:
    """A convolution of an image in NCHW with constant filters, between the transpositions that it runs NHWC by."""
    (x,) = inputs_of(shape, dtype=dtype)
    weight = np.random.default_rng(7).standard_normal(filters).astype("float16")
    value = op.permute_dims(x if dtype == "float16" else op.astype(x, "float16"), [0, 2, 3, 1])
    layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
    value = op.nn.relu(op.nn.conv2d(value, relax.const(weight), **layouts, **options))
    return module_of([x], op.permute_dims(value, [0, 3, 1, 2]) if last else value)


CONVOLUTIONS: dict[str, Callable[[], Any]] = {
    "window": lambda: convolved((2, 9, 8, 16), (24, 3, 3, 16), padding=1),
    "stride, dilation, one-sided padding": lambda: convolved(
        (2, 12, 11, 16), (24, 3, 2, 16), strides=(2, 1), dilation=(1, 2), padding=(0, 1, 1, 2)
    ),
    "window, bias, residual": lambda: convolved(
        (2, 9, 8, 16), (24, 3, 3, 16), lambda v, b, r: op.nn.relu(op.add(op.add(v, b), r)),
        others=[given(24), given(2, 9, 8, 24)], padding=1,
    ),
    "one position": lambda: convolved(
        (2, 9, 8, 32), (24, 1, 1, 32), lambda v, b: op.nn.silu(op.add(v, b)), others=[given(24)]
    ),
    "one position, strided": lambda: convolved((2, 9, 8, 32), (24, 1, 1, 32), strides=2),
    "first layer": lambda: convolved((2, 16, 16, 3), (24, 7, 7, 3), op.nn.relu, strides=2, padding=3),
    "planes, 7x7": lambda: planes((2, 3, 18, 17), (24, 7, 7, 3), strides=2, padding=3),
    "planes, 3x3 dilated": lambda: planes((2, 3, 18, 17), (24, 3, 3, 3), padding=2, dilation=2),
    "planes of float32": lambda: planes((1, 3, 12, 12), (16, 5, 5, 3), dtype="float32", padding=2),
    "planes to planes": lambda: planes((2, 4, 9, 8), (16, 1, 1, 4), last=True),
    "groups": lambda: convolved((2, 9, 8, 64), (64, 3, 3, 8), groups=8, padding=1),
    "depthwise": lambda: convolved(
        (2, 9, 8, 32), (32, 3, 3, 1), lambda v, b: op.nn.relu(op.add(v, b)), others=[given(32)], groups=32, padding=1,
        strides=2,
    ),
    "float32 window": lambda: convolved((2, 9, 8, 16), (24, 3, 3, 16), dtype="float32", padding=1),
    "deep window": lambda: convolved((1, 4, 4, 1024), (16, 3, 3, 1024), padding=1),  # slices, with a workspace
}  # fmt: skip

GRAPHS: dict[str, Callable[[], Any]] = {
    "product": lambda: product((24, 32), (32, 40)),
    "transposed": lambda: turned((40, 32)),
    "bias and gelu": lambda: product(
        (24, 32), (32, 40), lambda v, b: op.nn.gelu(op.add(v, b)), others=[given(40)]
    ),
    "column": lambda: product((24, 32), (32, 40), lambda v, c: op.subtract(c, v), others=[given(24, 1)]),
    "residual": lambda: product(
        (24, 32), (32, 40), lambda v, b, r: op.add(op.nn.relu(op.add(v, b)), r), others=[given(40), given(24, 40)]
    ),
    "its own residual": own_residual,
    "folded batch": lambda: product((3, 8, 32), (32, 40), lambda v, r: op.multiply(v, r), others=[given(3, 8, 40)]),
    "batch": lambda: product((3, 24, 32), (3, 32, 40), lambda v, b: op.add(v, b), others=[given(3, 1, 40)]),
    "batch with one operand": lambda: product((24, 32), (3, 32, 40), lambda v, r: op.add(v, r), others=[given(24, 40)]),
    "heads": heads,
    "float32": lambda: product((24, 32), (32, 40), lambda v, b: op.tanh(op.add(v, b)), dtype="float32",
                               others=[given(40, dtype="float32")]),
    "int8": scaled_integers,
    "narrow": lambda: product((24, 32), (32, 40), lambda v: op.clip(op.multiply(v, v), 0.25, 3)),
    "deep": lambda: product((16, 4096), (4096, 16)),  # splits K, with a workspace
    **CONVOLUTIONS,
}  # fmt: skip


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_region_computes_what_its_operators_do(name: str, functions: dict[str, Any], library: HostLibrary) -> None:
    arrays = drawn(functions[name])
    wanted = run_twin(functions[name], arrays)
    result = np.full(wanted.shape, np.nan, wanted.dtype)
    assert library.call(symbol(name), [*arrays, result]) == 0, library.message
    error = np.linalg.norm((result - wanted).astype("float64")) / np.linalg.norm(wanted.astype("float64"))
    assert error < (1e-5 if result.dtype == np.float32 else 2e-3)


@pytest.fixture
def call(functions: dict[str, Any], library: HostLibrary) -> Iterator[Callable[..., str]]:
    """Calls a product that must not run: the message."""
    arrays = [*drawn(functions["product"]), np.full((24, 40), 7, "float16")]

    def fail(count: int = 3, **settings: Any) -> str:
        assert library.call("product", arrays[:count], **settings) == -1
        assert (arrays[-1] == 7).all()
        return library.message

    yield fail
    for name, value in {"major": 8, "minor": 0, "error": 0}.items():
        library.set(name, value)


@pytest.mark.parametrize(("major", "minor"), [(7, 5), (9, 0), (12, 0)])
def test_a_device_of_another_architecture_is_an_error_that_says_so(
    major: int, minor: int, call: Callable[..., str], library: HostLibrary
) -> None:
    """Asked once for each device: here before any call has worked is not known, so a device of its own is asked."""
    library.set("major", major)
    library.set("minor", minor)
    said = call(number=major)
    assert f"machine code is for sm_80, and this device has compute capability {major}.{minor}" in said
    assert "Build the model for this device" in said


def test_without_a_driver_the_error_is_cuda_s_own(call: Callable[..., str], library: HostLibrary) -> None:
    library.set("error", 100)
    assert "no CUDA-capable device is detected" in call()


def test_what_are_no_tensors_of_the_device_is_refused(call: Callable[..., str]) -> None:
    assert "takes 3 tensors and was given 2" in call(count=2)
    assert "not on the CUDA device of the others" in call(device=CPU)
    assert "no multiple of 16 bytes" in call(offset=2)


def test_nothing_but_host_functions_is_visible(functions: dict[str, Any], on_cpu: Path) -> None:
    linked({"product": functions["product"]}, "nvidia-a100", on_cpu)
    done = subprocess.run(["nm", "--defined-only", "-g", on_cpu / "cutlass.o"], capture_output=True, text=True)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["__tvm_ffi_product"]


def test_alike_regions_share_a_kernel_and_a_second_time_compiles_nothing(on_cpu: Path) -> None:
    """Two distinct kernels of three regions: one translation unit for one thread, two for two."""
    compiled: list[str] = []

    def compile_once(source: str, architecture: str, **settings: Any) -> Any:
        compiled.append(source)
        return cutlass_on_cpu.compile_here(source, architecture, **settings)

    region = region_of(only_function(GRAPHS["residual"](), "nvidia-a100"))
    other = replace(region, value="other", operands=tuple(reversed(region.operands)))
    regions = {"one": region, "two": replace(region, value="two"), "three": other}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutlass_toolchain, "compile_gemm", compile_once)
        for threads in (1, 2):
            backend = CutlassBackend(lookup("nvidia-a100"), KernelCache(None))
            backend.compiler.threads = threads
            for _ in range(2):
                found, why_not = backend.kernels(regions)
                assert set(found) == set(regions) and not why_not
    assert len(compiled) == 3
    assert compiled[0] == compiled[1] + compiled[2]


def test_few_templates_serve_all_regions_nearly_as_fast() -> None:
    def candidates(**times: float) -> tuple[selection.Candidate, ...]:
        calls = {name: KernelCall(symbol=name, form=GEMM_CALL, numbers=()) for name in times}
        return tuple(
            selection.Candidate(name=name, time_us=time, architecture="", source=str, call=calls[name])
            for name, time in times.items()
        )

    found = {
        "one": candidates(a=10, b=10.2, c=20),
        "two": candidates(d=5, b=5.1, e=5.2, f=5.3, g=5.4),
        "three": candidates(c=1, b=1.2),
        "four": candidates(b=7, a=7.1),
    }
    shared = selection.share_templates(found)
    assert {region: items[0].name for region, items in shared.items()} == {
        "one": "b", "two": "b", "three": "c", "four": "b",
    }  # fmt: skip
    assert [item.name for item in shared["two"]] == ["b", "d", "e", "f"]
    assert selection.share_templates({}) == {}


def test_units_are_few_and_hold_sources_of_one_architecture() -> None:
    sources = [(f"#include <{'ab'[i % 2]}>\n// {i}\n", "sm_80") for i in range(20)]
    for workers in (1, 2, 3, 8, 100):
        units = units_of(sources, workers)
        assert sorted(item for unit in units for item in unit) == sorted(sources)
        assert sum(len({source[0].split("\n")[0] for source in unit}) == 2 for unit in units) <= 1
        assert max(map(len, units)) <= min(MOST_TOGETHER, -(-20 // workers))
        assert len(units) <= max(-(-20 // MOST_TOGETHER), workers)
    two = [*sources, *((text, "sm_90a") for text, _ in sources)]
    assert all(len({architecture for _, architecture in unit}) == 1 for unit in units_of(two, 3))
    assert units_of([], 2) == []
    mixed = [(f"{APART if i % 5 == 0 else '#include <gemm.h>'}\n// {i}\n", "sm_90a") for i in range(20)]
    units = units_of(mixed, 1)
    assert sorted(item for unit in units for item in unit) == sorted(mixed)
    assert all(len({APART in text for text, _ in unit}) == 1 for unit in units)


def test_what_is_refused_together_is_compiled_alone(on_cpu: Path) -> None:
    region = region_of(only_function(GRAPHS["residual"](), "nvidia-a100"))
    regions = {"one": region, "two": replace(region, operands=tuple(reversed(region.operands)))}
    tried = []

    def refuse_several(source: str, architecture: str, **settings: Any) -> Any:
        tried.append(source.count('extern "C" int32_t'))
        if tried[-1] > 1:
            raise CompileError("took longer than it may.", "")
        return cutlass_on_cpu.compile_here(source, architecture, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutlass_toolchain, "compile_gemm", refuse_several)
        backend = CutlassBackend(lookup("nvidia-a100"), KernelCache(None))
        backend.compiler.threads = 1
        found, why_not = backend.kernels(regions)
    assert tried == [2, 1, 1] and set(found) == set(regions) and not why_not
    assert not any(kernel.refused for kernel in found.values())


def test_a_template_that_the_compiler_refuses_gives_way_to_the_next(on_cpu: Path) -> None:
    def refuse_some(source: str, architecture: str, **settings: Any) -> Any:
        if refused is None or source.split()[1] in refused:
            raise CompileError("static assertion failed.", "")
        return cutlass_on_cpu.compile_here(source, architecture, **settings)

    region = region_of(only_function(GRAPHS["product"](), "nvidia-a100"))
    found = selection.candidates_of(region, lookup("nvidia-a100"))
    tried = selection.share_templates({"region": found})["region"]
    names, sources = [item.name for item in tried], [item.source() for item in tried]
    assert len(set(sources)) == selection.MOST_CANDIDATES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cutlass_toolchain,
            "compile_gemm",
            lambda source, *rest, **more: refuse_some(f"// {names[sources.index(source)]}\n{source}", *rest, **more),
        )
        refused: set[str] | None = {names[0], names[1]}
        kernels, _ = CutlassBackend(lookup("nvidia-a100"), KernelCache(None)).kernels({"region": region})
        assert kernels["region"].template == names[2]
        assert [text.split(":")[0] for text in kernels["region"].refused] == names[:2]
        assert "refused before it" in str(kernels["region"]) and "static assertion" in str(kernels["region"])
        refused = None
        kernels, why_not = CutlassBackend(lookup("nvidia-a100"), KernelCache(None)).kernels({"region": region})
        assert not kernels and "static assertion" in why_not["region"]


def test_stock_run_codegen_finds_the_generator(on_cpu: Path) -> None:
    """As a user of stock TVM alone would call it."""
    cut, _ = partition(GRAPHS["bias and gelu"](), "nvidia-a100")
    with tvm.target.Target("nvidia/nvidia-a100"):
        done = relax.transform.RunCodegen({"tvm_ext.cutlass": {"device": "nvidia-a100"}})(cut)
    (module,) = done.attrs["external_mods"]
    assert module.implements_function("cutlass_matmul_bias_gelu")
    assert 'R.call_dps_packed("cutlass_matmul_bias_gelu"' in done.script()
    reduced = product((24, 32), (32, 40), lambda v: op.sum(op.astype(v, "float32"), axis=[0]))
    cut, record = partition(reduced, "nvidia-a100")
    if record.taken[0].expression == "":
        with pytest.raises(CompileError, match="no visitor for sum_rows"), tvm.target.Target("nvidia/nvidia-a100"):
            relax.transform.RunCodegen({"tvm_ext.cutlass": {"device": "nvidia-a100"}})(cut)
