"""Torch modules by name, with random weights that let every layer be seen in the output, and inputs for them.

Nothing is downloaded: each module is made from its class and a configuration, the deep ones with fewer layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tvm_ext.errors import InputError, UnsupportedEnvironmentError

from .record import EXPORTERS

PACKAGES = ("onnxruntime", "torch", "torchvision", "timm", "transformers", "onnxscript")
REMEDY = "pip install 'tvm-ext[models]'"

CALIBRATION_BATCH = 4

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


def missing_packages() -> tuple[str, ...]:
    """Those of the extra ``models`` that are not installed."""
    return tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None)


def require_packages() -> None:
    """Raise UnsupportedEnvironmentError where the extra is not installed."""
    if missing := missing_packages():
        raise UnsupportedEnvironmentError(f"exporting networks needs {', '.join(missing)}.", REMEDY)


def network(name: str) -> Network:
    """Raises InputError for an unknown name."""
    if name not in NETWORKS:
        raise InputError(f"there is no network {name!r}.", f"the networks are {', '.join(NETWORKS)}")
    return NETWORKS[name]


def make(name: str, seed: int) -> Any:
    """The module in inference mode, its weights drawn with ``seed``."""
    import torch

    torch.manual_seed(seed)
    module = network(name).make().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                _redraw(parameter)
        _draw_statistics(module, tuple(draw_inputs(name, seed, batch=CALIBRATION_BATCH).values()))
    return module


def _draw_statistics(module: Any, inputs: Sequence[Any]) -> None:
    """Give BatchNorms the statistics of ``inputs``, and move those at random.

    With statistics that have nothing to do with its values a deep network answers every input alike. With its values'
    own it magnifies what hardly varies, and rounding with it (LeViT by 10^5): hence variances have a lower bound.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    norms = [item for item in module.modules() if isinstance(item, _BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0  # of the last values, all
        norm.train()
    if norms:
        module(*inputs)
    for norm in norms:
        norm.eval()
        mean, variance = norm.running_mean, norm.running_var
        mean.add_(variance.sqrt() * mean.new_empty(norm.num_features).normal_(0.0, 0.1))
        variance.clamp_(min=float(variance.mean())).mul_(mean.new_empty(norm.num_features).uniform_(0.65, 1.5))


def _redraw(parameter: Any) -> None:
    """A scale of 1, a bias or a closing layer of 0, a layer scale of 1e-6 hide what is wrong with or behind them."""
    if float(parameter.flatten()[0]) == 0.0:
        parameter.normal_(0.0, 0.1)
    else:
        parameter.uniform_(0.5, 1.5)


def draw_inputs(name: str, seed: int, batch: int | None = None) -> dict[str, Any]:
    """Torch tensors by input name: standard normal, or integers below the network's bound; masks end in zeros.

    ``batch`` takes the place of the network's own batch size.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    chosen = network(name)
    drawn = {}
    for key, own in chosen.inputs.items():
        shape = own if batch is None else (batch, *own[1:])
        if key == "attention_mask":
            drawn[key] = (torch.arange(shape[-1]) < shape[-1] - 5 - seed).long().expand(shape).contiguous()
        elif key in chosen.below:
            drawn[key] = torch.randint(0, chosen.below[key], shape, generator=generator)
        else:
            drawn[key] = torch.randn(shape, generator=generator)
    return drawn


def _torchvision(constructor: str, **options: Any) -> Callable[[], Any]:
    def construct() -> Any:
        return getattr(_models_of_torchvision(), constructor)(**options)

    return construct


def _recurrent(layer: str, **options: Any) -> Network:
    """A layer of torch itself; its states come out as well."""

    def construct() -> Any:
        import torch

        return getattr(torch.nn, layer)(12, 16, **options)

    return Network(package="torch", make=construct, inputs={"sequence": (3, 7, 12)})


def _models_of_torchvision() -> Any:
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


def _timm(architecture: str, **options: Any) -> Callable[[], Any]:
    def construct() -> Any:
        _models_of_torchvision()  # timm imports it
        import timm

        return timm.create_model(architecture, pretrained=False, **options)

    return construct


def _transformers(
    model: str, config: str, *, names: Sequence[str] = ("input_ids", "attention_mask"), part: str = "", **options: Any
) -> Callable[[], Any]:
    """Of ``model``, or of its attribute ``part``, all tensors that it answers to inputs called ``names``.

    Attention is computed by plain operators ("eager"), as both exporters can write it.
    """

    def construct() -> Any:
        _models_of_torchvision()  # transformers imports it where it is installed
        import transformers

        settings = getattr(transformers, config)(**options)
        settings._attn_implementation = "eager"
        settings.use_cache = False
        module = getattr(transformers, model)(settings)
        module = getattr(module, part) if part else module

        def call(*values: Any) -> Any:
            answer = module(**dict(zip(names, values, strict=True))).to_tuple()
            return tuple(item for item in answer if hasattr(item, "shape"))

        return _adapted(call, module)

    return construct


def _convnext() -> Any:
    block = _models_of_torchvision().convnext.CNBlockConfig
    settings = [block(96, 192, 1), block(192, 384, 1), block(384, 768, 2), block(768, None, 1)]
    return _models_of_torchvision().ConvNeXt(settings)


def _swin() -> Any:
    return _models_of_torchvision().SwinTransformer(
        patch_size=[4, 4], embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=[4, 4]
    )


def _vit() -> Any:
    return _models_of_torchvision().VisionTransformer(
        image_size=64, patch_size=16, num_layers=3, num_heads=12, hidden_dim=768, mlp_dim=3072
    )


def _densenet() -> Any:
    return _models_of_torchvision().DenseNet(growth_rate=16, block_config=(3, 4, 3), num_init_features=32)


def _segmentation(constructor: str) -> Callable[[], Any]:
    def construct() -> Any:
        module = getattr(_models_of_torchvision().segmentation, constructor)(weights=None, weights_backbone=None)
        return _adapted(lambda image: module(image)["out"], module)

    return construct


def _adapted(call: Callable[..., Any], module: Any) -> Any:
    """A module that computes ``call`` with the parameters of ``module``."""
    import torch

    class Adapter(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *values: Any) -> Any:
            return call(*values)

    return Adapter()


_TOKENS: Mapping[str, Size] = {"input_ids": (1, 24)}
_MASKED: Mapping[str, Size] = {"input_ids": (2, 24), "attention_mask": (2, 24)}
_WORDS = 1000
_SMALL: Mapping[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": _WORDS}


def _text(model: str, config: str, inputs: Mapping[str, Size] = _MASKED, **options: Any) -> Network:
    return Network(
        package="transformers",
        make=_transformers(model, config, names=tuple(inputs), **{"vocab_size": _WORDS, **options}),
        inputs=inputs,
        below={"input_ids": _WORDS},
    )


def _image(make_module: Callable[[], Any], package: str = "torchvision", size: int = 64, batch: int = 1) -> Network:
    return Network(package=package, make=make_module, inputs={"pixel_values": (batch, 3, size, size)})


NETWORKS: Mapping[str, Network] = {
    "resnet18": _image(_torchvision("resnet18", weights=None), batch=2),
    "mobilenet_v2": _image(_torchvision("mobilenet_v2", weights=None)),
    "mobilenet_v3_small": _image(_torchvision("mobilenet_v3_small", weights=None), size=96),
    "efficientnet_b0": _image(_torchvision("efficientnet_b0", weights=None)),
    "shufflenet_v2": _image(_torchvision("shufflenet_v2_x0_5", weights=None)),
    "regnet_y": _image(_torchvision("regnet_y_400mf", weights=None)),
    "mnasnet": _image(_torchvision("mnasnet0_5", weights=None), size=75),
    "densenet": _image(_densenet),
    "convnext": _image(_convnext),
    "swin": _image(_swin, size=56),
    "vit": _image(_vit),
    "deeplab_v3": _image(_segmentation("deeplabv3_mobilenet_v3_large"), size=65),
    "lraspp": _image(_segmentation("lraspp_mobilenet_v3_large")),
    "fcn": _image(_segmentation("fcn_resnet50")),
    "mixer": _image(_timm("mixer_s32_224", img_size=64, num_classes=100), "timm"),
    "levit": _image(_timm("levit_128s", img_size=224, num_classes=100), "timm", size=224),
    "poolformer": _image(_timm("poolformer_s12", num_classes=100), "timm"),
    "ghostnet": _image(_timm("ghostnet_050", num_classes=100), "timm"),
    "mobilevit": _image(_timm("mobilevit_xxs", num_classes=100), "timm"),
    "bert": _text("BertModel", "BertConfig", **_SMALL),
    "electra": _text("ElectraModel", "ElectraConfig", embedding_size=128, **_SMALL),
    "albert": _text("AlbertModel", "AlbertConfig", embedding_size=64, intermediate_size=512, **_SMALL),
    "distilbert": _text("DistilBertModel", "DistilBertConfig", dim=256, n_heads=4, n_layers=2, hidden_dim=512),
    "gpt2": _text("GPT2LMHeadModel", "GPT2Config", n_embd=256, n_head=4, n_layer=2),
    "llama": replace(
        _text("LlamaForCausalLM", "LlamaConfig", _TOKENS, num_key_value_heads=2, intermediate_size=512, **_SMALL),
        exporters=("dynamo",),  # TorchScript's knows no aten::diff
    ),
    "t5_encoder": _text(
        "T5EncoderModel", "T5Config", d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4
    ),
    "clip_text": _text(
        "CLIPTextModel", "CLIPTextConfig", hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, eos_token_id=_WORDS - 1,
    ),
    "segformer": Network(
        package="transformers",
        make=_transformers(
            "SegformerForSemanticSegmentation", "SegformerConfig", names=("pixel_values",), depths=[1, 1, 1, 1],
            num_labels=10,
        ),
    ),
    "wav2vec2": Network(
        package="transformers",
        make=_transformers(
            "Wav2Vec2Model", "Wav2Vec2Config", names=("input_values",), hidden_size=192, intermediate_size=384,
            num_hidden_layers=2, num_attention_heads=4, conv_dim=(128,) * 7,
        ),
        inputs={"input_values": (1, 8000)},
    ),
    "whisper_encoder": Network(
        package="transformers",
        make=_transformers(
            "WhisperModel", "WhisperConfig", names=("input_features",), part="encoder", num_mel_bins=80, d_model=128,
            encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=256, decoder_layers=1,
            decoder_attention_heads=4, max_source_positions=100,
        ),
        inputs={"input_features": (1, 80, 200)},
    ),
    "lstm": _recurrent("LSTM", num_layers=2, bidirectional=True, batch_first=True),
    "gru": _recurrent("GRU", num_layers=2),
    "rnn": _recurrent("RNN", nonlinearity="relu", bidirectional=True, bias=False),
}  # fmt: skip
