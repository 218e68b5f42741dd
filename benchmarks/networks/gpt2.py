"""GPT-2 (Radford et al. 2019): the decoder of 12 layers with random weights, over all tokens of a prompt at once."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from .bert import EncoderShape, EncoderWriter, additive_mask, random_layer, random_norm
from .graph import GraphWriter, small_normal

GPT2 = EncoderShape(hidden_size=768, intermediate_size=3072, heads=12, layers=12, norm_epsilon=1e-5)
GPT2_WORDS, GPT2_POSITIONS = 50257, 1024


class DecoderWriter(EncoderWriter):
    """Layers that normalise before, not behind, attention and dense layers; one product makes queries, keys, values."""

    def layer(self, prefix: str, hidden: str, mask: str, name: str = "") -> str:
        before = self.norm(f"{prefix}.attention.output.LayerNorm", hidden)
        attended = self.dense(f"{prefix}.attention.output.dense", self.attention(prefix, before, mask))
        hidden = self.graph.op("Add", attended, hidden)
        before = self.norm(f"{prefix}.output.LayerNorm", hidden)
        wide = self.gelu(self.dense(f"{prefix}.intermediate.dense", before))
        return self.graph.op("Add", self.dense(f"{prefix}.output.dense", wide), hidden, name=name)

    def projected(self, prefix: str, hidden: str) -> tuple[str, ...]:
        name = f"{prefix}.attention.self"
        for part in ("weight", "bias"):
            own = [self.weights[f"{name}.{kind}.{part}"] for kind in ("query", "key", "value")]
            self.weights[f"{name}.joint.{part}"] = np.concatenate(own)
        joint = self.dense(f"{name}.joint", hidden)
        return self.graph.ops("Split", joint, results=3, name=f"{name}.split", axis=-1)

    def gelu(self, source: str) -> str:
        """x * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
        graph = self.graph
        cube = graph.op("Mul", graph.op("Mul", source, source), source)
        term = graph.op("Mul", cube, graph.constant("cubic", np.float32(0.044715)))
        scale = graph.constant("root_2_pi", np.float32(np.sqrt(2 / np.pi)))
        inner = graph.op("Tanh", graph.op("Mul", graph.op("Add", source, term), scale))
        gate = graph.op("Add", inner, graph.constant("one", np.float32(1)))
        return graph.op("Mul", graph.op("Mul", source, gate), graph.constant("half", np.float32(0.5)))


def build_gpt2(*, batch: int, sequence: int, seed: int, layers: int = GPT2.layers) -> onnx.ModelProto:
    """``input_ids`` int64 [batch, sequence] to ``last_hidden_state`` float32 [batch, sequence, 768], no language head.

    ``attention_mask`` int64 [sequence, sequence] has 1 where a token (row) may attend to another, as ``numpy.tri`` has.
    124 million weights; fewer ``layers`` are the first ones. ``sequence`` is at most 1024.
    """
    graph = GraphWriter("gpt2")
    hidden = GPT2.hidden_size
    ids = graph.input("input_ids", (batch, sequence), TensorProto.INT64)
    words = graph.constant("words", small_normal(seed, "words", (GPT2_WORDS, hidden), deviation=0.02))
    places = small_normal(seed, "positions", (GPT2_POSITIONS, hidden), deviation=0.02)[None, :sequence]
    value = graph.op("Add", graph.op("Gather", words, ids), graph.constant("positions", places))
    mask = additive_mask(graph, graph.input("attention_mask", (sequence, sequence), TensorProto.INT64), (0, 1))
    for index in range(layers):
        prefix = f"layer.{index}"
        writer = DecoderWriter(graph, dict(random_layer(GPT2, seed, prefix)), GPT2, batch, sequence)
        value = writer.layer(prefix, value, mask)
    last = DecoderWriter(graph, random_norm(seed, "last", hidden), GPT2, batch, sequence)
    graph.output(last.norm("last", value, "last_hidden_state"), (batch, sequence, hidden))
    return graph.model({"weights": f"random, seed {seed}"})
