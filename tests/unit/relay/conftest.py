"""The library that the tests of the front door share."""

from __future__ import annotations

import pytest

from tests.unit.relay.dense import dense_model
from tvm_ext import relay


@pytest.fixture(scope="module")
def library() -> relay.Library:
    mod, params = relay.frontend.from_onnx(dense_model())
    return relay.build(mod, "llvm", params=params)
