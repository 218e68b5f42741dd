"""The source of a kernel: what it says, that it compiles, and what is said where the package is not."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.fatbins import read_fatbin
from tests.support.random_templates.products import architecture_of, device_of, epilogue_of
from tests.unit.compilers import needs_nvcc
from tvm_ext.byoc_cutlass import _cutlass
from tvm_ext.byoc_cutlass.emit import emit_gemm, symbol_of
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.gemm import GemmConfig, packed_problem
from tvm_ext.byoc_cutlass.products import ProductFamily
from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.records.partition import CutlassProblem, EpilogueOperand, Order
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.toolchains.cutlass_toolchain import compile_gemm

needs_package = pytest.mark.skipif(
    not any(item.metadata["Name"] == _cutlass.PACKAGE for item in metadata.distributions()),
    reason="the extra `cutlass` is not installed",
)


def product(layout_b: Order = "row", m: int = 256, k: int = 256, batch: int = 1) -> CutlassProblem:
    return packed_problem(m=m, n=256, k=k, arithmetic="float16", out_dtype="float16", layout_b=layout_b, batch=batch)


def best(capability: tuple[int, int], m: int = 256, k: int = 256) -> GemmConfig:
    problem = product(m=m, k=k)
    family = ProductFamily(problem, device_of(capability), epilogue_of("relu(accum + row)", "float16"))
    return family.propose()[0].config


@needs_package
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_the_text_has_both_entry_points_and_every_parameter(capability: tuple[int, int]) -> None:
    config, epilogue = best(capability, m=4096, k=4096), epilogue_of("relu(accum + row)", "float16")
    text = emit_gemm(config, epilogue, product("column"))
    symbol = symbol_of(config, epilogue, product("column"))
    assert f'extern "C" int32_t {symbol}(' in text
    assert f'extern "C" int64_t {symbol}_workspace_bytes(' in text
    assert "using LayoutB = cutlass::layout::ColumnMajor;" in text
    assert f"{'Stages = ' if config.generation == '2.x' else 'StageCount<'}{config.stages}" in text
    assert "torch" not in text
    assert text.count("{") == text.count("}")


@needs_package
def test_a_split_takes_the_form_whose_splits_are_arguments() -> None:
    config = best((8, 0), m=64, k=16384)
    assert config.split_k > 1
    text = emit_gemm(config, epilogue_of("accum", "float16"), product())
    assert "ThreadblockSwizzleStreamK" in text
    assert "call.split_k" in text


@needs_package
def test_names_are_those_of_c_and_differ_with_layouts_and_epilogues() -> None:
    config = best((8, 0))
    epilogues = [epilogue_of(text, "float16") for text in ("accum", "relu(accum)")]
    problems = (product(), product("column"))
    names = [symbol_of(config, epilogue, problem) for epilogue in epilogues for problem in problems]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"[a-z]\w*", name) for name in names)


@needs_package
@needs_nvcc
def test_a_kernel_compiles_and_a_second_time_is_read_from_the_cache(tmp_path: Path) -> None:
    """One small template, without its host code, whose errors the front end finds all the same and which takes as long
    again; the others are compiled by the slow tests, whole.
    """
    text = emit_gemm(best((8, 0)), epilogue_of("relu(accum + row)", "float16"), product())
    cache = KernelCache(tmp_path)
    first, second = (compile_gemm(text, "sm_80", cache=cache, time_limit_s=500, output="fatbin") for _ in range(2))
    assert [(image.kind, image.architecture) for image in read_fatbin(first.image)] == [("elf", 80)]
    assert (first.cached, second.cached) == (False, True)
    assert second.image == first.image


@pytest.mark.parametrize("found", [None, "4.3.0.0", "3.9.2"])
def test_the_package_is_asked_for_by_name_and_version(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UnsupportedEnvironmentError, match=r"(?s)nvidia-cutlass.*tvm-ext\[cutlass\].*==4\.2\.0\.0"):
        _cutlass.include_folders()


def test_the_extra_installs_the_version_that_is_asked_for() -> None:
    requirements = metadata.requires("tvm-ext") or []
    asked = [item for item in requirements if item.startswith(_cutlass.PACKAGE)]
    assert asked
    assert all(item.split(";")[0].strip() == f"{_cutlass.PACKAGE}=={_cutlass.VERSION}" for item in asked)


@needs_package
@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_batches_compile_with_operands_of_their_own(capability: tuple[int, int]) -> None:
    roles = ("row", "column", "matrix")
    operands = [
        EpilogueOperand(name=f"{role}{distance}", role=role, dtype="float16", batch_stride=distance)
        for role in roles
        for distance in (0, 1)
    ]
    expression = " + ".join(["accum", *(operand.name for operand in operands)])
    epilogue = Epilogue(expression=expression, operands=tuple(operands), out_dtype="float16")
    family = ProductFamily(product(m=512, k=128, batch=4), device_of(capability), epilogue)
    text = family.source(family.propose()[0].config)
    assert "call.operand_batches[1]" in text
    assert compile_gemm(text, architecture_of(capability), time_limit_s=500).image.startswith(b"\x7fELF")
