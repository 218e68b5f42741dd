"""The command that judges Bolt's operators as templates: each is recognised, whole, on every device that it names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.unit.benchmarks.gpu_scripts import FOLDER, imported_scripts
from tvm_ext.devices.device_db import lookup

ROW = {"table": "T", "shape": "", "paper_speedup": "1"}


@pytest.fixture(scope="module")
def templates() -> Iterator[ModuleType]:
    with imported_scripts():
        sys.path.insert(0, str(FOLDER.parent))
        yield importlib.import_module("templates")
        sys.path.remove(str(FOLDER.parent))


def test_every_operator_is_recognised_with_its_whole_epilogue(templates: ModuleType) -> None:
    for case in templates.bolt(templates.WORKLOAD):
        verdict = templates.Verdict(**ROW, id=case.id, device="")
        region = templates.region_in(case, lookup("nvidia-a100"), verdict)
        assert region is not None, verdict.refused
        assert region.pattern.endswith(case.attributes["activation"]), case.id
        assert ("conv2d" in region.pattern) == ("conv2d" in case.operator)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("device", ["nvidia-a100", "nvidia-h100"])
def test_padded_channels_are_predicted_to_pay(device: str, templates: ModuleType) -> None:
    """Table 3's first row, and a convolution of Figure 9, which needs no padding."""
    cases = {case.id: case for case in templates.bolt(templates.WORKLOAD)}
    narrow = templates.judge(cases["B10a_relu"], ROW, lookup(device), [])
    assert narrow.recognised and narrow.legal > 100
    assert narrow.padded_us < narrow.time_us
    whole = templates.judge(cases["B17a_gelu"], ROW, lookup(device), [])
    assert whole.padded_us is None
    assert ("bulk" in whole.template) == (device == "nvidia-h100")
