"""Torch modules by name, with random weights that let every layer be seen in the output, and inputs for them.

Nothing is downloaded: each module is made from its class and a configuration, the deep ones with fewer layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm_ext.errors import InputError, UnsupportedEnvironmentError

from .makers import (
    Network,
    Size,
    from_segmentation,
    from_timm,
    from_torchvision,
    from_transformers,
    image_network,
    torchvision_models,
)
from .open_networks import MORE
from .timed import PREFIX, TIMED

PACKAGES = ("onnxruntime", "torch", "torchvision", "timm", "transformers", "onnxscript")
REMEDY = "pip install 'tvm-ext[models]'"

CALIBRATION_BATCH = 4


def missing_packages() -> tuple[str, ...]:
    """Those of the extra ``models`` that are not installed."""
    return tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None)


def require_packages() -> None:
    """Raise UnsupportedEnvironmentError where the extra is not installed."""
    if missing := missing_packages():
        raise UnsupportedEnvironmentError(f"exporting networks needs {', '.join(missing)}.", REMEDY)


def network(name: str) -> Network:
    """Raises InputError for an unknown name."""
    known = {**NETWORKS, **MORE, **{PREFIX + key: value for key, value in TIMED.items()}}
    if name not in known:
        raise InputError(f"there is no network {name!r}.", f"the networks are {', '.join(known)}")
    return known[name]


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


def _convnext() -> Any:
    block = torchvision_models().convnext.CNBlockConfig
    settings = [block(96, 192, 1), block(192, 384, 1), block(384, 768, 2), block(768, None, 1)]
    return torchvision_models().ConvNeXt(settings)


def _swin() -> Any:
    return torchvision_models().SwinTransformer(
        patch_size=[4, 4], embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=[4, 4]
    )


def _vit() -> Any:
    return torchvision_models().VisionTransformer(
        image_size=64, patch_size=16, num_layers=3, num_heads=12, hidden_dim=768, mlp_dim=3072
    )


def _densenet() -> Any:
    return torchvision_models().DenseNet(growth_rate=16, block_config=(3, 4, 3), num_init_features=32)


def _recurrent(layer: str, **options: Any) -> Network:
    """A layer of torch itself; its states come out as well."""

    def construct() -> Any:
        import torch

        return getattr(torch.nn, layer)(12, 16, **options)

    return Network(package="torch", make=construct, inputs={"sequence": (3, 7, 12)})


_TOKENS: Mapping[str, Size] = {"input_ids": (1, 24)}
_MASKED: Mapping[str, Size] = {"input_ids": (2, 24), "attention_mask": (2, 24)}
_WORDS = 1000
_SMALL: Mapping[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": _WORDS}


def _text(model: str, config: str, inputs: Mapping[str, Size] = _MASKED, **options: Any) -> Network:
    return Network(
        package="transformers",
        make=from_transformers(model, config, names=tuple(inputs), **{"vocab_size": _WORDS, **options}),
        inputs=inputs,
        below={"input_ids": _WORDS},
    )


NETWORKS: Mapping[str, Network] = {
    "resnet18": image_network(from_torchvision("resnet18", weights=None), batch=2),
    "mobilenet_v2": image_network(from_torchvision("mobilenet_v2", weights=None)),
    "mobilenet_v3_small": image_network(from_torchvision("mobilenet_v3_small", weights=None), size=96),
    "efficientnet_b0": image_network(from_torchvision("efficientnet_b0", weights=None)),
    "shufflenet_v2": image_network(from_torchvision("shufflenet_v2_x0_5", weights=None)),
    "regnet_y": image_network(from_torchvision("regnet_y_400mf", weights=None)),
    "mnasnet": image_network(from_torchvision("mnasnet0_5", weights=None), size=75),
    "densenet": image_network(_densenet),
    "convnext": image_network(_convnext),
    "swin": image_network(_swin, size=56),
    "vit": image_network(_vit),
    "deeplab_v3": image_network(from_segmentation("deeplabv3_mobilenet_v3_large"), size=65),
    "lraspp": image_network(from_segmentation("lraspp_mobilenet_v3_large")),
    "fcn": image_network(from_segmentation("fcn_resnet50")),
    "mixer": image_network(from_timm("mixer_s32_224", img_size=64, num_classes=100), "timm"),
    "levit": image_network(from_timm("levit_128s", img_size=224, num_classes=100), "timm", size=224),
    "poolformer": image_network(from_timm("poolformer_s12", num_classes=100), "timm"),
    "ghostnet": image_network(from_timm("ghostnet_050", num_classes=100), "timm"),
    "mobilevit": image_network(from_timm("mobilevit_xxs", num_classes=100), "timm"),
    "bert": _text("BertModel", "BertConfig", **_SMALL),
    "roberta": _text("RobertaModel", "RobertaConfig", pad_token_id=0, **_SMALL),
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
        make=from_transformers(
            "SegformerForSemanticSegmentation", "SegformerConfig", names=("pixel_values",), depths=[1, 1, 1, 1],
            num_labels=10,
        ),
    ),
    "wav2vec2": Network(
        package="transformers",
        make=from_transformers(
            "Wav2Vec2Model", "Wav2Vec2Config", names=("input_values",), hidden_size=192, intermediate_size=384,
            num_hidden_layers=2, num_attention_heads=4, conv_dim=(128,) * 7,
        ),
        inputs={"input_values": (1, 8000)},
    ),
    "whisper_encoder": Network(
        package="transformers",
        make=from_transformers(
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
