"""The cases of `onnx.backend.test`: every operator test and every small model, with inputs and expected outputs."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

# Values may differ here by more than the case allows; nothing else of the case is excused.
VALUE_TOLERANCES: tuple[tuple[str, float, str], ...] = (
    (r"attention_.*fp16", 4e-3, "ONNX's numbers come from a softmax in half precision, ours from one in float32"),
    (r"silu_fp16", 2e-3, "half precision at the edge of the case's tolerance"),
    (r"test_dft_inverse", 1e-3, "where ONNX's own sums cancel to 2e-7 instead of 0"),
    (r"test_mish", 2e-3, "one of 10000 elements differs by 1.26e-3 relatively, with stock kernels"),
)
"""(regular expression of names, relative tolerance, reason)."""

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model with one or more (inputs, expected outputs) pairs; `name` is `kind/test_name`."""

    name: str
    model: onnx.ModelProto
    data_sets: tuple[tuple[list[Any], list[Any]], ...]
    rtol: float
    atol: float


def load_cases() -> dict[str, Case]:
    """Every case by name, sorted."""
    found = {}
    for kind in KINDS:
        for case in load_model_tests(kind=kind):
            loaded = _from_memory(kind, case) if case.model_dir is None else _from_folder(kind, case)
            found[loaded.name] = loaded
    return {name: _with_tolerance(case) for name, case in sorted(found.items())}


def operators_of(case: Case) -> set[str]:
    """The operators at the top level of a case's graph."""
    return {node.op_type for node in case.model.graph.node}


def of_each_operator(cases: Mapping[str, Case], every: int = 1) -> dict[str, Case]:
    """Those, in their order, that have an operator which no case before them has: all operators, of which none twice.

    Of these each ``every``-th.

    Some are there in pieces as well, where ONNX says of what functions an operator is made.
    """
    chosen, seen = {}, set[str]()
    for name, case in cases.items():
        if operators_of(case) - seen:
            chosen[name] = case
            seen |= operators_of(case)
    return {name: chosen[name] for name in list(chosen)[::every]}


def _with_tolerance(case: Case) -> Case:
    for pattern, rtol, _ in VALUE_TOLERANCES:
        if re.search(pattern, case.name):
            return replace(case, rtol=max(case.rtol, rtol), atol=max(case.atol, rtol / 10))
    return case


def _from_memory(kind: str, case: Any) -> Case:
    pairs = tuple(
        ([_value(item) for item in given], [_value(item) for item in wanted]) for given, wanted in case.data_sets
    )
    return Case(name=f"{kind}/{case.name}", model=case.model, data_sets=pairs, rtol=case.rtol, atol=case.atol)


def _value(item: Any) -> Any:
    return numpy_helper.to_array(item) if isinstance(item, onnx.TensorProto) else item


def _from_folder(kind: str, case: Any) -> Case:
    model = onnx.load(os.path.join(case.model_dir, "model.onnx"))
    pairs = []
    for folder in sorted(glob.glob(os.path.join(case.model_dir, "test_data_set_*"))):
        given = [_read(folder, f"input_{index}.pb", value) for index, value in enumerate(model.graph.input)]
        wanted = [_read(folder, f"output_{index}.pb", value) for index, value in enumerate(model.graph.output)]
        pairs.append(([item for item in given if item is not None], wanted))
    return Case(name=f"{kind}/{case.name}", model=model, data_sets=tuple(pairs), rtol=case.rtol, atol=case.atol)


def _read(folder: str, file: str, declared: onnx.ValueInfoProto) -> Any:
    """One stored value; None for an initializer that an old model also lists as an input, which has no file."""
    path = os.path.join(folder, file)
    if not os.path.exists(path):
        return None
    with open(path, "rb") as stream:
        data = stream.read()
    if declared.type.HasField("sequence_type"):
        sequence = onnx.SequenceProto()
        sequence.ParseFromString(data)
        return numpy_helper.to_list(sequence)
    if declared.type.HasField("optional_type"):
        optional = onnx.OptionalProto()
        optional.ParseFromString(data)
        return numpy_helper.to_optional(optional)
    tensor = onnx.TensorProto()
    tensor.ParseFromString(data)
    return numpy_helper.to_array(tensor)
