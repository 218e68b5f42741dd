"""The command ``tvm-ext quantize``: ONNX Runtime quantises a model, which is then compiled and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import common


def quantize(
    model: common.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The quantised ONNX model to write.")],
    calibrate: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Samples of each input by name, along the first axis.")
    ] = None,
    mode: Annotated[
        Literal["static", "operators", "dynamic"],
        typer.Option(help="static: QDQ; operators: QLinear operators; dynamic: weights alone, no samples needed."),
    ] = "static",
    per_channel: Annotated[
        bool, typer.Option("--per-channel/--per-tensor", help="A scale for each channel of weights, or one for all.")
    ] = True,
    activations: Annotated[
        Literal["uint8", "int8"], typer.Option(help="Type of activations, of the static modes.")
    ] = "uint8",
    rounds: Annotated[
        int, typer.Option(min=0, help="Also time both models, in so many turns. Default: no timing.")
    ] = 0,
    target: common.Target = "llvm",
    shape: common.ShapeOption = None,
    batch: common.Batch = 1,
    seed: common.Seed = 0,
    as_json: common.AsJson = False,
) -> None:
    """Quantise a model to 8 bits by ONNX Runtime, compile it and report its error against the float32 model.

    Without samples, which mode dynamic allows, the error is that of one random input.
    """
    from tvm_ext.bench import models, quantise
    from tvm_ext.records.serialise import to_json
    from tvm_ext.relay_passes.onnx.load import load_onnx
    from tvm_ext.support.files import write_atomically

    with common.progress_bar(5) as steps:
        steps.begin("loading")
        proto = load_onnx(common.load_model(model, batch))
        samples = []
        if calibrate is not None:
            samples = quantise.calibration_samples(proto, common.read_inputs([str(calibrate)]))
        steps.begin("quantising")
        smaller = quantise.quantised(proto, mode, samples, per_channel=per_channel, activations=activations)
        samples = samples or [models.random_inputs(proto, seed, shape=common.parse_shapes(shape))]
        result = quantise.compare(proto, smaller, mode, samples, target=target, rounds=rounds, progress=steps.begin)
        write_atomically(output, smaller.SerializeToString())
    if as_json:
        typer.echo(to_json(result))
        return
    typer.echo(f"{result.bytes_before / 1e6:.1f} MB became {result.bytes_after / 1e6:.1f} MB")
    for name, error in result.errors:
        typer.echo(f"{name}: relative error {error:.2e} at most, of {result.samples} samples")
    if result.float_s and result.quantised_s:
        times = f"{result.quantised_s * 1e3:.3g} ms, the float32 model {result.float_s * 1e3:.3g} ms"
        typer.echo(f"a run takes {times}: {result.float_s / result.quantised_s:.2f} times as fast")
    typer.echo(f"wrote {output}")
