"""Networks at the sizes at which they are used, for `benchmarks/exported.py`. Deep encoders have fewer layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .makers import (
    Network,
    adapted,
    from_segmentation,
    from_timm,
    from_torchvision,
    from_transformers,
    headed,
    image_network,
    torchvision_models,
)  # fmt: skip

PREFIX = "timed_"
"""Of these networks' names beside those of `networks`, which has some of them in small."""

SIDE = 224


def _timm(architecture: str, side: int = SIDE, **options: Any) -> Network:
    return image_network(from_timm(architecture, **options), "timm", size=side)


def _torchvision(constructor: str, side: int = SIDE) -> Network:
    return image_network(from_torchvision(constructor, weights=None), size=side)


def _reparametrised(architecture: str) -> Network:
    """Of blocks whose branches are one convolution each when they are used."""
    train = from_timm(architecture)

    def construct() -> Any:
        from timm.utils.model import reparameterize_model

        return reparameterize_model(train().eval())

    return image_network(construct, "timm", size=SIDE)


def _unet() -> Any:
    """U-Net (Ronneberger et al., 2015) of a quarter of its channels, its convolutions padded, with BatchNorm."""
    from torch import cat, nn

    def double(before: int, after: int) -> Any:
        def layers(channels: int) -> list[Any]:
            return [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

        return nn.Sequential(*layers(before), *layers(after))

    widths = (16, 32, 64, 128, 256)
    parts = nn.ModuleDict({
        "down": nn.ModuleList(map(double, (3, *widths), widths)),
        "grow": nn.ModuleList(nn.ConvTranspose2d(width, width // 2, 2, stride=2) for width in widths[:0:-1]),
        "up": nn.ModuleList(double(width, width // 2) for width in widths[:0:-1]),
        "last": nn.Conv2d(widths[0], 2, 1),
    })  # fmt: skip
    halve = nn.MaxPool2d(2)

    def call(pixels: Any) -> Any:
        kept = [parts["down"][0](pixels)]
        for block in parts["down"][1:]:
            kept.append(block(halve(kept[-1])))
        value = kept.pop()
        for grow, block in zip(parts["grow"], parts["up"], strict=True):
            value = block(cat((kept.pop(), grow(value)), 1))
        return parts["last"](value)

    return adapted(call, parts)


def _c3d() -> Any:
    """C3D (Tran et al., 2015) of half its channels: eight 3x3x3 convolutions, pools between them."""
    from torch import nn

    layers: list[Any] = []
    before = 3
    for index, widths in enumerate(((32,), (64,), (128, 128), (256, 256), (256, 256))):
        for width in widths:
            layers += [nn.Conv3d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool3d((1, 2, 2) if index == 0 else 2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 9, 512), nn.ReLU(), nn.Linear(512, 101))


def _clip(make: Callable[[], Any], frames: int) -> Network:
    return Network(package="torchvision", make=make, inputs={"frames": (1, 3, frames, 112, 112)})


def _r3d() -> Any:
    return torchvision_models().video.r3d_18(weights=None)


def _speech() -> Network:
    """Wav2Vec2-base of 4 layers on one second."""
    names = ("input_values",)
    make = from_transformers("Wav2Vec2Model", "Wav2Vec2Config", names=names, num_hidden_layers=4)
    return Network(package="transformers", make=make, inputs={names[0]: (1, 16000)})


def _gpt2() -> Any:
    """GPT-2 (124 million parameters): one more token behind those whose keys and values are given."""
    torchvision_models()  # transformers imports it
    import transformers
    from torch import cat

    settings = transformers.GPT2Config(attn_implementation="eager")
    module = transformers.GPT2LMHeadModel(settings)

    def call(token: Any, past: Any) -> Any:
        cache = transformers.DynamicCache()
        for layer in range(settings.n_layer):
            cache.update(past[:, 2 * layer], past[:, 2 * layer + 1], layer)
        answer = module(input_ids=token, past_key_values=cache, use_cache=True)
        new = [getattr(own, kind)[:, None, :, -1:] for own in cache.layers for kind in ("keys", "values")]
        return answer.logits, cat(new, 1)

    return adapted(call, module)


def _decoder() -> Network:
    inputs = {"token": (1, 1), "past": (1, 24, 12, 128, 64)}
    return Network(package="transformers", make=_gpt2, inputs=inputs, below={"token": 50257})


TIMED: Mapping[str, Network] = {
    # torchvision
    "resnet18": _torchvision("resnet18"),
    "wide_resnet50": _torchvision("wide_resnet50_2"),
    "mobilenet_v2": _torchvision("mobilenet_v2"),
    "mobilenet_v3": _torchvision("mobilenet_v3_large"),
    "efficientnet_b0": _torchvision("efficientnet_b0"),
    "shufflenet_v2": _torchvision("shufflenet_v2_x1_0"),
    "regnet_y": _torchvision("regnet_y_400mf"),
    "regnet_x": _torchvision("regnet_x_800mf"),
    "mnasnet": _torchvision("mnasnet1_0"),
    "convnext": _torchvision("convnext_tiny"),
    "swin": _torchvision("swin_t"),
    "deeplab_v3": image_network(from_segmentation("deeplabv3_mobilenet_v3_large"), size=256),
    "fcn": image_network(from_segmentation("fcn_resnet50"), size=128),
    "ssdlite": image_network(headed("ssdlite320_mobilenet_v3_large"), size=320),
    "retinanet": image_network(headed("retinanet_resnet50_fpn"), size=160),
    "r3d": _clip(_r3d, 8),
    "c3d": _clip(_c3d, 16),
    "unet": image_network(_unet, "torch", size=SIDE),
    # timm
    "resnetv2": _timm("resnetv2_50"),
    "densenet_blur": _timm("densenetblur121d"),
    "resnet_blur": _timm("resnetblur50"),
    "mobileone": _reparametrised("mobileone_s1"),
    "repvgg": _reparametrised("repvgg_a1"),
    "eca_resnet": _timm("ecaresnet26t"),
    "dla34": _timm("dla34"),
    "hrnet": _timm("hrnet_w18_small"),
    "tinynet": _timm("tinynet_a", side=192),
    "ghostnet": _timm("ghostnet_100"),
    "cspnet": _timm("cspresnet50"),
    "vovnet": _timm("ese_vovnet19b_dw"),
    "xception": _timm("xception41"),
    "mixnet": _timm("mixnet_s"),
    "levit": _timm("levit_192"),
    "poolformer": _timm("poolformer_s12"),
    "pvt": _timm("pvt_v2_b0"),
    "mobilevit": _timm("mobilevit_s", side=256),
    "resnest": _timm("resnest14d"),
    "sknet": _timm("skresnet18"),
    "res2net": _timm("res2net50_26w_4s"),
    "resnext": _timm("resnext50_32x4d"),
    "dpn": _timm("dpn68"),
    "nfnet": _timm("dm_nfnet_f0", side=192),
    "edgenext": _timm("edgenext_small"),
    "efficientformer": _timm("efficientformer_l1"),
    "convmixer": _timm("convmixer_768_32", side=112),
    "rexnet": _timm("rexnet_100"),
    "vit": _timm("deit_tiny_patch16_224"),
    "vit_b": _torchvision("vit_b_16"),
    "mixer": _timm("mixer_s16_224"),
    # transformers
    "wav2vec2": _speech(),
    "gpt2_decode": _decoder(),
}
