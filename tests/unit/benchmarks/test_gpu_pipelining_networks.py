"""Whole networks by pipelining mode: ``benchmarks/gpu/pipelining_networks.py`` and the bundle's contenders."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.networks.graph import GraphWriter
from tests.unit.benchmarks.gpu_scripts import FOLDER
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions

A100 = lookup("nvidia-a100")


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    names = ("pipelining_networks", "bundle_models", "bundle_code", "models")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER.parent)):
            del sys.modules[name]


def product() -> onnx.ModelProto:
    """A product of a long reduction, which few blocks compute without split-K, and softmax."""
    graph = GraphWriter("product")
    weight = graph.constant("weight", np.ones((1024, 64), np.float32))
    scores = graph.op("MatMul", graph.input("x", (64, 1024)), weight)
    graph.output(graph.op("Softmax", scores, axis=-1, name="y"), (64, 64))
    return graph.model()


def test_each_mode_takes_its_best_tile_and_other_operators_count_alike(scripts: SimpleNamespace) -> None:
    script, options = scripts.pipelining_networks, BuildOptions(enable_persistent_fusion=False)
    found = script.totals(script.operators_of(product(), A100, options), A100, options)
    for total in found.values():
        times = total.times_us
        assert (total.calls, total.pipelined) == (1, 1) and 0 < total.others_us < times["full"]
        assert times["none"] > times["double"] > times["multistage"] > times["full"]
    assert found[True].times_us["none"] < found[False].times_us["none"], "few blocks wait for their loads"
    assert found[True].others_us == found[False].others_us


def test_layers_behind_the_second_cost_what_the_second_does(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = scripts.pipelining_networks

    def total(layers: int, _device: Any, _options: Any) -> Any:
        """Embeddings of 5 us, which have no stages; layers of 10 us without stages."""
        times = {mode: 5.0 + layers * (10.0 - place) for place, mode in enumerate(script.BY_MODE)}
        return dict.fromkeys((False, True), script.Total(times_us=times, others_us=5.0, calls=2 * layers))

    monkeypatch.setattr(script, "operators_of", lambda model, _device, _options: model)
    monkeypatch.setattr(script, "totals", total)
    for build, layers in ((lambda count: count, 12), (lambda _: 12, 0)):
        first, second = script.outcomes("encoder", script.Network(build=build, paper=1.0, layers=layers), A100)
        assert first.times_us == second.times_us == pytest.approx({"none": 125, "double": 113} | first.times_us)
        assert (first.others_us, first.calls) == (5.0, 24) and first.speedup["double"] == pytest.approx(125 / 113)


def test_a_bundle_of_modes_has_networks_in_all_of_them(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With products apart, as ALCOP's are; "ours" is what a build makes."""
    bundle, made = scripts.bundle_models, {}
    case = SimpleNamespace(module=None, case=scripts.bundle_models.Entry)
    monkeypatch.setattr(bundle, "model_case", lambda *_arguments: case)
    monkeypatch.setattr(bundle, "replace", lambda case, **_changes: case)
    monkeypatch.setattr(bundle, "compile_model", lambda _module, _device, options: SimpleNamespace(operators=options))
    monkeypatch.setattr(bundle, "flops_of", lambda _operators: 1.0)
    monkeypatch.setattr(
        bundle, "_program", lambda _made, contender, compiled, _settings: made.update({contender: compiled.operators})
    )
    bundle.make_model_entry("m", scripts.models.Model(build=product), SimpleNamespace(device=A100, pipelining=True))
    modes = scripts.bundle_code.PIPELINING_MODES
    assert set(made) == {"ours", "dlight", *modes}
    assert [made[name].enable_pipelining for name in modes] == [False, True, True, True]
    assert [made[name].pipelining for name in list(modes)[1:]] == ["double", "multistage", "full"]
    assert all(made[name].enable_persistent_fusion is False for name in modes)
    assert made["ours"] == BuildOptions()
    networks = scripts.pipelining_networks.alcop_models()
    assert len(networks) == 6 and {item.group for item in networks.values()} == {"alcop_models"}
