"""Ways to make torch modules with random weights: of torchvision, timm or transformers, or around a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .record import EXPORTERS

Size = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """``make`` gives the module; ``inputs`` has a shape for each input by name, and ``below`` the bound of integers.

    ``exporters`` are those of torch.onnx.export that can write it.
    """

    package: str
    make: Callable[[], Any]
    inputs: Mapping[str, Size] = field(default_factory=lambda: {"pixel_values": (1, 3, 64, 64)})
    below: Mapping[str, int] = field(default_factory=dict)
    exporters: tuple[str, ...] = EXPORTERS


def from_torchvision(constructor: str, **options: Any) -> Callable[[], Any]:
    def construct() -> Any:
        return getattr(torchvision_models(), constructor)(**options)

    return construct


def torchvision_models() -> Any:
    """Its models need none of its compiled operators, which cannot be loaded where torch has no CUDA and it has."""
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):
        _declare_operators(torch)
    import torchvision

    return torchvision.models


_DECLARED: list[Any] = []


def _declare_operators(torch: Any) -> None:
    """Let `import torchvision` register what it knows about two operators; they stay without an implementation."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARED.append(library)  # its end would undeclare them


def from_timm(architecture: str, **options: Any) -> Callable[[], Any]:
    def construct() -> Any:
        torchvision_models()  # timm imports it
        import timm

        return timm.create_model(architecture, pretrained=False, **options)

    return construct


def from_transformers(
    model: str, config: str, *, names: Sequence[str] = ("input_ids", "attention_mask"), part: str = "", **options: Any
) -> Callable[[], Any]:
    """Of ``model``, or of its attribute ``part``, all tensors that it answers to inputs called ``names``.

    Attention is computed by plain operators ("eager"), as both exporters can write it.
    """

    def construct() -> Any:
        torchvision_models()  # transformers imports it where it is installed
        import transformers

        settings = getattr(transformers, config)(**options)
        settings._attn_implementation = "eager"
        settings.use_cache = False
        module = getattr(transformers, model)(settings)
        module = getattr(module, part) if part else module

        def call(*values: Any) -> Any:
            answer = module(**dict(zip(names, values, strict=True))).to_tuple()
            return tuple(item for item in answer if hasattr(item, "shape"))

        return adapted(call, module)

    return construct


def from_segmentation(constructor: str) -> Callable[[], Any]:
    def construct() -> Any:
        module = getattr(torchvision_models().segmentation, constructor)(weights=None, weights_backbone=None)
        return adapted(lambda image: module(image)["out"], module)

    return construct


def adapted(call: Callable[..., Any], module: Any) -> Any:
    """A module that computes ``call`` with the parameters of ``module``."""
    import torch

    class Adapter(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *values: Any) -> Any:
            return call(*values)

    return Adapter()


def headed(constructor: str) -> Callable[[], Any]:
    """A detector of torchvision as far as its heads: boxes are chosen from those by operators of torchvision's own."""

    def construct() -> Any:
        options = {"weights": None, "weights_backbone": None}
        module = getattr(torchvision_models().detection, constructor)(**options)

        def call(pixels: Any) -> Any:
            answers = module.head(list(module.backbone(pixels).values()))
            return tuple(answers.values())

        return adapted(call, module)

    return construct


def image_network(
    make_module: Callable[[], Any], package: str = "torchvision", size: int = 64, batch: int = 1
) -> Network:
    return Network(package=package, make=make_module, inputs={"pixel_values": (batch, 3, size, size)})
