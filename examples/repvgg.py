"""Bolt's case study on speed (§4.3) with RepVGG: `python examples/repvgg.py [--size 224] [--batch 1] [--rounds 5]`.

Measured on this machine's CPU, interleaved: the network as it is trained and re-parameterised, with other
activations, deepened by 1x1 convolutions, and both. Predicted for GPUs, in half precision and batches of 32: the same
variants. Beside them are Bolt's measurements on a T4. Accuracies are the paper's subject as well, and need training.
`--network a0 a1 b0` has the rows of Tables 5 and 6; `--no-measuring` predicts only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # for benchmarks.networks

import numpy as np

from benchmarks.networks.repvgg import LAYERS, RepVggName, build_repvgg
from tvm_ext import relay
from tvm_ext.bench import models
from tvm_ext.bench.timing import Runner, interleave, median
from tvm_ext.cli.advise import advice_on
from tvm_ext.devices.device_db import lookup
from tvm_ext.relay_passes.onnx.half import to_half

TRAINED, BASE = "as it is trained", "ReLU"
GPU_BATCH = 32

DEEPENED = "ReLU, deepened (Aug)"

# Variant: options of the builder, and by network Bolt's images a second on a T4 (Tables 4 to 6, §4.3).
VARIANTS: dict[str, tuple[dict[str, Any], dict[RepVggName, str]]] = {
    TRAINED: ({"trained": True}, {}),
    BASE: ({}, {"a0": "5909, in Tables 5 and 6 7861", "a1": "6253", "b0": "4888"}),
    "GELU": ({"activation": "Gelu"}, {"a0": "5645 of 5909"}),
    "Hardswish": ({"activation": "HardSwish"}, {"a0": "5713 of 5909"}),
    "Softplus": ({"activation": "Softplus"}, {"a0": "5453 of 5909"}),
    DEEPENED: ({"deepened": True}, {"a0": "6716 of 7861", "a1": "5241 of 6253", "b0": "4145 of 4888"}),
    "Hardswish, deepened": (
        {"deepened": True, "activation": "HardSwish"},
        {"a0": "6338 of 7861", "a1": "4868 of 6253", "b0": "3842 of 4888"},
    ),
    "Hardswish, 3 deepened": ({"deepened": 3, "activation": "HardSwish"}, {"a0": "7288 of 7861"}),
}


def measure(network: RepVggName, batch: int, size: int, rounds: int, names: Sequence[str]) -> dict[str, float]:
    """Median seconds of each variant on this CPU, all in turns in this process."""
    modules, results = {}, {}
    for name in names:
        model = build_repvgg(network, batch=batch, size=size, **VARIANTS[name][0])
        mod, params = relay.frontend.from_onnx(model)
        module = relay.GraphModule(relay.build(mod, "llvm", params=params))
        module.run(**models.random_inputs(model))
        modules[name], results[name] = module, module.get_output(0).numpy()
    difference = np.linalg.norm(results[BASE] - results[TRAINED]) / np.linalg.norm(results[BASE])
    print(f"re-parameterised against as it is trained: relative difference {difference:.1e}")
    samples = interleave([Runner(name=name, run=module.run) for name, module in modules.items()], rounds=rounds)
    return {name: median(values) for name, values in samples.items()}


def predict(network: RepVggName, device: str, size: int, names: Sequence[str]) -> dict[str, float]:
    """Predicted seconds of each variant's products and epilogues on a GPU, with persistent kernels where these pay."""
    seconds = {}
    for name in names:
        model = build_repvgg(network, batch=GPU_BATCH, size=size, **VARIANTS[name][0])
        mod, params = relay.frontend.from_onnx(to_half(model))
        advice = advice_on(relay.prepare(mod, params), lookup(device))
        seconds[name] = (advice.products_us + advice.epilogues_us - advice.chains_saved_us) / 1e6
    return seconds


def show(network: RepVggName, title: str, batch: int, seconds: dict[str, float]) -> None:
    print(f"\n{title}\n{f'RepVGG-{network.upper()}':24}{'images/s':>10}{'of ReLU':>9}   Bolt on a T4, measured")
    for name, value in seconds.items():
        print(f"{name:24}{batch / value:10.0f}{seconds[BASE] / value:9.2f}   {VARIANTS[name][1].get(network, '')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", nargs="+", default=["a0"], choices=list(LAYERS))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", nargs="*", default=["nvidia-t4", "nvidia-a100"], help="GPUs to predict for")
    parser.add_argument("--variant", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--no-measuring", action="store_true", help="predict only")
    arguments = parser.parse_args()
    for network in arguments.network:
        wanted = [name for name in arguments.variant if network == "a0" or network in VARIANTS[name][1]]
        if not arguments.no_measuring:
            names = list(dict.fromkeys((TRAINED, BASE, *wanted)))
            measured = measure(network, arguments.batch, arguments.size, arguments.rounds, names)
            show(network, f"measured on this CPU, float32, batch {arguments.batch}", arguments.batch, measured)
        for device in arguments.device:
            names = list(dict.fromkeys((BASE, *(name for name in wanted if name != TRAINED))))
            predicted = predict(network, device, arguments.size, names)
            title = f"predicted for {device}, float16, batch {GPU_BATCH}: products and epilogues"
            show(network, title, GPU_BATCH, predicted)


if __name__ == "__main__":
    main()
