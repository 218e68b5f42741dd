"""Real topologies of the onnx wheel: what is left of them after the import."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from tvm import relax

from tvm_ext.relay_passes.onnx.import_model import import_model

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def _operators(mod: Any) -> Counter[str]:
    found: Counter[str] = Counter()

    def visit(node: Any) -> None:
        name = getattr(getattr(node, "op", None), "name", "")
        if name.startswith("relax."):
            found[name.removeprefix("relax.")] += 1

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # 53 convolutions and 1 classifier with a bias each, 16 residual additions; no normalization, no bias reshapes.
        ("resnet50", {"nn.conv2d": 53, "add": 53 + 1 + 16, "nn.relu": 49, "multiply": 0, "nn.batch_norm": 0}),
        # Of 121 normalizations 59 follow a convolution and vanish in it, 62 precede one: one Mul and one Add each.
        ("densenet121", {"nn.conv2d": 121, "multiply": 62, "add": 62 + 60, "nn.batch_norm": 0, "expand_dims": 0}),
        ("inception_v2", {"nn.conv2d": 69, "add": 69 + 1, "multiply": 0, "expand_dims": 0}),
        ("squeezenet", {"nn.conv2d": 26, "add": 26, "nn.dropout": 0}),
    ],
)
def test_light_model(model: str, expected: dict[str, int]) -> None:
    mod, params = import_model(LIGHT / f"light_{model}.onnx")
    found = _operators(mod)
    assert {name: found[name] for name in expected} == expected
    function = mod["main"]
    assert [parameter.name for parameter in function.params][int(function.attrs["num_input"]) :] == list(params)


def test_batch_of_eight() -> None:
    mod, _ = import_model(LIGHT / "light_squeezenet.onnx", {"data_0": [8, 3, 224, 224]})
    assert int(mod["main"].ret_ty.shape[0]) == 8
