"""The command ``tvm-ext advise``: what would make a model faster on a GPU if it were changed (Bolt §3.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError, OptionError
from tvm_ext.records.advice import ModelAdvice

if TYPE_CHECKING:
    import onnx

    from tvm_ext._tvm import IRModule

DEFAULT_DEVICE = "nvidia-a100"


def advise(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or the name of a built-in model.")],
    device: Annotated[str, typer.Option(help="GPU to predict for (see `tvm-ext devices`).")] = DEFAULT_DEVICE,
    dtype: Annotated[
        str, typer.Option(help="float16: convert a float32 model to half precision; keep: leave it.")
    ] = "float16",
    shape: Annotated[list[str] | None, typer.Option(metavar="NAME=SIZES", help="An input's shape.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch of a built-in model.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts instead of tables.")] = False,
) -> None:
    """Predict what a model would gain on a GPU with other channels, activations and 1x1 convolutions (Bolt §3.3)."""
    from tvm_ext.devices.device_db import lookup
    from tvm_ext.records import serialise

    from .advise_text import render
    from .common import load_model, output_console, parse_shapes, progress_bar

    spec = lookup(device)
    _require_matrix_units(spec)
    if dtype not in ("float16", "keep"):
        raise OptionError(f"--dtype {dtype!r} is not known.", "write float16 or keep")
    with progress_bar(2) as steps:
        steps.begin("importing")
        mod = imported(load_model(model, batch), parse_shapes(shape or []), half=dtype == "float16")
        steps.begin("predicting")
        found = advice_on(mod, spec)
    if as_json:
        typer.echo(serialise.to_json(found))
        return
    console = output_console()
    for part in render(found):
        console.print(part)


def _require_matrix_units(spec: DeviceSpec) -> None:
    from tvm_ext.cost.alignment_model import has_matrix_units

    if spec.kind != "cuda" or not has_matrix_units(spec, "float16"):
        raise InputError(
            f"{spec.name} has none of NVIDIA's matrix units, which all of this advice is about.",
            "name a GPU from the V100 on: `tvm-ext devices` lists them",
        )


def imported(model: str | onnx.ModelProto, shape: dict[str, list[int]], *, half: bool) -> IRModule:
    """The model's graph with its parameters; in half precision where that is asked for."""
    from tvm_ext import relay
    from tvm_ext.relay_passes.onnx.half import to_half
    from tvm_ext.relay_passes.onnx.load import load_onnx

    proto = load_onnx(model)
    mod, params = relay.frontend.from_onnx(to_half(proto) if half else proto, shape=shape or None)
    return relay.prepare(mod, params)


def advice_on(mod: IRModule, device: DeviceSpec) -> ModelAdvice:
    """Advice on a module with bound parameters."""
    from tvm_ext._tvm import RelaxFunction, Sequential, relax
    from tvm_ext.byoc_cutlass.advice import advise as advise_on
    from tvm_ext.byoc_cutlass.graph_values import GraphValues
    from tvm_ext.pass_pipeline import graph_passes
    from tvm_ext.records.padding import PADDING, PaddingRecord
    from tvm_ext.records.serialise import from_json
    from tvm_ext.relay_passes.layout.channels_last import ChannelsLast
    from tvm_ext.relay_passes.padding.pad_alignment import PadAlignment

    passes = [ChannelsLast(device, always=True, grouped=True), relax.transform.DeadCodeElimination()]
    ready = Sequential([*graph_passes(), *passes, PadAlignment(device)])(mod)
    graphs = [func for _, func in ready.functions_items() if isinstance(func, RelaxFunction)]
    values = [GraphValues(ready, func) for func in graphs if isinstance(func.body, relax.SeqExpr)]
    return advise_on(values, from_json(PaddingRecord, str(ready.attrs[PADDING])), device)
