"""Further torch modules, for runs with open axes alone: as `networks.NETWORKS`, of other families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .makers import Network, Size, from_timm, from_transformers, image_network

_WORDS = 1000
_SMALL: Mapping[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 256,
    "vocab_size": _WORDS,
}  # fmt: skip


def _timm(architecture: str, size: int = 64, **options: Any) -> Network:
    made = image_network(from_timm(architecture, num_classes=100, **options), "timm", size=size)
    return replace(made, exporters=("dynamo",))


def _text(
    model: str, config: str, inputs: tuple[str, ...] = ("input_ids", "attention_mask"), **options: Any
) -> Network:
    shapes: Mapping[str, Size] = dict.fromkeys(inputs, (2, 24))
    make = from_transformers(model, config, names=inputs, **{**_SMALL, **options})
    return Network(package="transformers", make=make, inputs=shapes, below={"input_ids": _WORDS}, exporters=("dynamo",))


MORE: Mapping[str, Network] = {
    "res2net": _timm("res2net50_26w_4s"),
    "hrnet": _timm("hrnet_w18_small"),
    "repvit": _timm("repvit_m0_9"),
    "edgenext": _timm("edgenext_xx_small"),
    "pvt_v2": _timm("pvt_v2_b0"),
    "nfnet": _timm("eca_nfnet_l0"),
    "convmixer": _timm("convmixer_768_32"),
    "efficientvit": _timm("efficientvit_b0"),
    "xcit": _timm("xcit_nano_12_p16_224"),
    "dla": _timm("dla34"),
    "mpnet": _text("MPNetModel", "MPNetConfig"),
    "deberta_v2": _text("DebertaV2Model", "DebertaV2Config"),
    "squeezebert": _text("SqueezeBertModel", "SqueezeBertConfig", embedding_size=128),
    "modernbert": _text("ModernBertModel", "ModernBertConfig", pad_token_id=0),
    "mistral": _text("MistralForCausalLM", "MistralConfig", ("input_ids",), num_key_value_heads=2),
    "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", ("input_ids",), num_key_value_heads=2),
    "gpt_neox": _text("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "esm": _text("EsmModel", "EsmConfig", pad_token_id=0, position_embedding_type="rotary"),
}
