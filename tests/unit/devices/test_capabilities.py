"""Architectures as they are written, and what came with which capability."""

from __future__ import annotations

import pytest

from tvm_ext.devices import device_db
from tvm_ext.devices.capabilities import (
    ASYNC_COPIES_SINCE,
    BULK_COPIES_SINCE,
    LDMATRIX_SINCE,
    MATRIX_UNITS_SINCE,
    architecture_number,
    architecture_suffix,
    capability_of,
    has,
)
from tvm_ext.errors import OptionError


@pytest.mark.parametrize(
    ("text", "number", "suffix", "capability"),
    [("sm_37", 37, "37", (3, 7)), ("sm_90a", 90, "90a", (9, 0)), ("sm_121f", 121, "121f", (12, 1))],
)
def test_an_architecture_is_read(text: str, number: int, suffix: str, capability: tuple[int, int]) -> None:
    assert (architecture_number(text), architecture_suffix(text), capability_of(text)) == (number, suffix, capability)


@pytest.mark.parametrize("text", ["sm_8O", "80", "compute_80", "sm_90b", "", "sm_80 "])
def test_anything_else_is_refused(text: str) -> None:
    for read in (architecture_number, architecture_suffix, capability_of):
        with pytest.raises(OptionError, match="is not a CUDA architecture"):
            read(text)


def test_what_devices_have() -> None:
    since = (MATRIX_UNITS_SINCE, LDMATRIX_SINCE, ASYNC_COPIES_SINCE, BULK_COPIES_SINCE)
    found = {
        name: [has(device_db.lookup(name), item) for item in since] for name in ("k80", "v100", "t4", "a100", "h200")
    }
    assert {name: sum(values) for name, values in found.items()} == {"k80": 0, "v100": 1, "t4": 2, "a100": 3, "h200": 4}


@pytest.mark.parametrize("device", [device_db.as_opencl(device_db.lookup("h200")), device_db.lookup("mi50")])
def test_only_cuda_has_them(device: device_db.DeviceSpec) -> None:
    assert not has(device, MATRIX_UNITS_SINCE)
