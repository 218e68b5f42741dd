"""Bolt's case study on speed (§4.3) with RepVGG: `python examples/repvgg.py [--size 224] [--batch 1] [--rounds 5]`.

Measured on this machine's CPU, interleaved: the network as it is trained and re-parameterised, with other
activations, and deepened by 1x1 convolutions. Predicted for GPUs, in half precision and batches of 32: the same
variants. Beside them are Bolt's measurements on a T4. Accuracies are the paper's subject as well, and need training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # for benchmarks.networks

import numpy as np

from benchmarks.networks.repvgg import build_repvgg
from tvm_ext import relay
from tvm_ext.bench import models
from tvm_ext.bench.timing import Runner, interleave, median
from tvm_ext.cli.advise import advice_on
from tvm_ext.devices.device_db import lookup
from tvm_ext.relay_passes.onnx.half import to_half

TRAINED, BASE = "as it is trained", "ReLU"
GPU_BATCH = 32

# Variant: options of the builder, and Bolt's images a second on a T4 (Table 4; Table 5, whose A0 ran at 7861).
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    TRAINED: ({"trained": True}, ""),
    BASE: ({}, "5909, in Table 5 7861"),
    "GELU": ({"activation": "Gelu"}, "5645"),
    "Hardswish": ({"activation": "HardSwish"}, "5713"),
    "Softplus": ({"activation": "Softplus"}, "5453"),
    "ReLU, deepened (Aug)": ({"deepened": True}, "6716 of 7861"),
}


def measure(batch: int, size: int, rounds: int, names: Sequence[str]) -> dict[str, float]:
    """Median seconds of each variant on this CPU, all in turns in this process."""
    modules, results = {}, {}
    for name in names:
        model = build_repvgg(batch=batch, size=size, **VARIANTS[name][0])
        mod, params = relay.frontend.from_onnx(model)
        module = relay.GraphModule(relay.build(mod, "llvm", params=params))
        module.run(**models.random_inputs(model))
        modules[name], results[name] = module, module.get_output(0).numpy()
    difference = np.linalg.norm(results[BASE] - results[TRAINED]) / np.linalg.norm(results[BASE])
    print(f"re-parameterised against as it is trained: relative difference {difference:.1e}")
    samples = interleave([Runner(name=name, run=module.run) for name, module in modules.items()], rounds=rounds)
    return {name: median(values) for name, values in samples.items()}


def predict(device: str, size: int, names: Sequence[str]) -> dict[str, float]:
    """Predicted seconds of each variant's products and epilogues on a GPU, with persistent kernels where these pay."""
    seconds = {}
    for name in names:
        model = build_repvgg(batch=GPU_BATCH, size=size, **VARIANTS[name][0])
        mod, params = relay.frontend.from_onnx(to_half(model))
        advice = advice_on(relay.prepare(mod, params), lookup(device))
        seconds[name] = (advice.products_us + advice.epilogues_us - advice.chains_saved_us) / 1e6
    return seconds


def show(title: str, batch: int, seconds: dict[str, float]) -> None:
    print(f"\n{title}\n{'RepVGG-A0':24}{'images/s':>10}{'of ReLU':>9}   Bolt on a T4, measured")
    for name, value in seconds.items():
        print(f"{name:24}{batch / value:10.0f}{seconds[BASE] / value:9.2f}   {VARIANTS[name][1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", nargs="*", default=["nvidia-t4", "nvidia-a100"], help="GPUs to predict for")
    parser.add_argument("--variant", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    arguments = parser.parse_args()
    names = list(dict.fromkeys((TRAINED, BASE, *arguments.variant)))
    measured = measure(arguments.batch, arguments.size, arguments.rounds, names)
    show(f"measured on this CPU, float32, batch {arguments.batch}", arguments.batch, measured)
    for device in arguments.device:
        predicted = predict(device, arguments.size, names)
        show(f"predicted for {device}, float16, batch {GPU_BATCH}: products and epilogues", GPU_BATCH, predicted)


if __name__ == "__main__":
    main()
