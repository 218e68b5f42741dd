"""Everyday tests run code that was made quickly; targets that name a level of optimisation keep it."""

from __future__ import annotations

import json

import pytest
import tvm
from tvm import te

from tests.support.quick_code import unoptimised


def doubled() -> tvm.IRModule:
    a = te.placeholder((8,), "float32")
    func = te.create_prim_func([a, te.compute((8,), lambda i: a[i] * 2.0)])
    return tvm.IRModule({"doubled": func.with_attr("global_symbol", "doubled")})


def level(target: dict[str, object]) -> object:
    """The level of optimisation of the code that is made for ``target``."""
    module = tvm.tirx.build(doubled(), target=tvm.target.Target(target))
    return json.loads(module.get_function("_get_target_string")()).get("opt-level")


@pytest.mark.optimised
def test_levels() -> None:
    before = level({"kind": "llvm"})
    with unoptimised():
        assert level({"kind": "llvm"}) == 0
        assert level({"kind": "llvm", "opt-level": 2}) == 2
    assert level({"kind": "llvm"}) == before != 0
