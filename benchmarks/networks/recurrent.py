"""The recurrent networks of Rammer's evaluation (Ma et al., OSDI 2020, Table 1), with seeded weights.

The paper states layers, widths and lengths (benchmarks/workloads/rammer_models.csv). What it leaves open is said at
each network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from .graph import FloatArray, GraphWriter, generator, he_normal, small_normal


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Layers of forward LSTMs, each as wide as the others, over ``steps`` steps."""

    steps: int
    layers: int
    hidden: int


LSTM_TC = Stack(steps=100, layers=10, hidden=256)
LSTM_TC_CLASSES = 10
SEQ2SEQ_ENCODER, SEQ2SEQ_DECODER = Stack(steps=100, layers=8, hidden=128), Stack(steps=30, layers=4, hidden=128)
SEQ2SEQ_WORDS = 128
SPEECH_FRAMES, SPEECH_BINS, SPEECH_FILTERS, SPEECH_CHARACTERS = 300, 161, 32, 29
SPEECH_STACK = Stack(steps=150, layers=7, hidden=256)


def build_lstm_tc(*, batch: int, seed: int, stack: Stack = LSTM_TC) -> onnx.ModelProto:
    """LSTM for text classification: embedded words ``x`` [steps, batch, hidden] to ``logits`` [batch, 10].

    The words come embedded, as wide as the layers; the last hidden state goes to one dense layer.
    """
    graph = GraphWriter("lstm_tc")
    value = graph.input("x", (stack.steps, batch, stack.hidden))
    value, last, _ = lstm_stack(graph, seed, "lstm", value, stack.hidden, stack)
    state = graph.op("Squeeze", last[-1], graph.constant("first", np.array([0])))
    weight = he_normal(seed, "classes", (stack.hidden, LSTM_TC_CLASSES), fan_in=2 * stack.hidden)
    graph.op("MatMul", state, graph.constant("classes", weight), name="logits")
    graph.output("logits", (batch, LSTM_TC_CLASSES))
    return graph.model({"weights": f"random, seed {seed}"})


def build_seq2seq(
    *,
    batch: int,
    seed: int,
    encoder: Stack = SEQ2SEQ_ENCODER,
    decoder: Stack = SEQ2SEQ_DECODER,
    words: int | None = SEQ2SEQ_WORDS,
) -> onnx.ModelProto:
    """Encoder and greedy decoder: ``source`` [100, batch, 128] to ``scores`` [batch, 30, words] of words.

    The word of the largest score at one step is looked up and is the next step's input; the first is word 0. Layers of
    the decoder start in the states that the last layers of the encoder ended in. ``words=None`` is the decoder of the
    paper's published artifact: the output of a step is the input of the next, the encoder's the first; ``scores`` are
    [batch, 30, 128] then. No attention, and 128 words: the paper names neither.
    """
    graph = GraphWriter("seq2seq_nmt")
    source = graph.input("source", (encoder.steps, batch, encoder.hidden))
    _, hidden, cells = lstm_stack(graph, seed, "encoder", source, encoder.hidden, encoder)
    scores = _decoded(graph, seed, list(zip(hidden, cells, strict=True)), decoder, batch, words)
    joined = graph.op("Concat", *scores, axis=0) if len(scores) > 1 else scores[0]
    graph.op("Transpose", joined, perm=[1, 0, 2], name="scores")
    graph.output("scores", (batch, decoder.steps, words or decoder.hidden))
    return graph.model({"weights": f"random, seed {seed}"})


def _decoded(
    graph: GraphWriter, seed: int, encoded: Sequence[tuple[str, str]], decoder: Stack, batch: int, words: int | None
) -> list[str]:
    """By step, [1, batch, words] scores, or outputs where there are no words, behind the encoder's last states."""
    states, value = encoded[-decoder.layers :], encoded[-1][0]
    one = replace(decoder, steps=1)
    scores: list[str] = []
    for step in range(decoder.steps):
        if words is not None:
            table = graph.constant("table", he_normal(seed, "table", (words, decoder.hidden), fan_in=2))
            first = graph.constant("first_word", np.zeros((1, batch), np.int64))
            value = graph.op("Gather", table, graph.op("ArgMax", scores[-1], axis=2, keepdims=0) if scores else first)
        value, hidden, cells = lstm_stack(graph, seed, "decoder", value, decoder.hidden, one, states, f"_{step}")
        states = list(zip(hidden, cells, strict=True))
        if words is not None:
            weight = he_normal(seed, "words", (decoder.hidden, words), fan_in=decoder.hidden)
            scores.append(graph.op("MatMul", value, graph.constant("words", weight)))
        else:
            scores.append(value)
    return scores


def build_deepspeech2(
    *, batch: int, seed: int, frames: int = SPEECH_FRAMES, stack: Stack = SPEECH_STACK
) -> onnx.ModelProto:
    """``spectrogram`` [batch, 1, 161, 300] to ``logits`` [batch, 150, 29].

    The convolutions are those of DeepSpeech 2 (Amodei et al. 2016): 41x11 by steps of 2 and 2, 21x11 by steps of 2 and
    1 (bins by frames), 32 filters each, with clipped ReLU; so 300 frames are 150 steps of 41 x 32 features.
    """
    graph = GraphWriter("deepspeech2")
    value = graph.input("spectrogram", (batch, 1, SPEECH_BINS, frames))
    bins = SPEECH_BINS
    for index, (inner, kernel, strides) in enumerate([(1, (41, 11), (2, 2)), (SPEECH_FILTERS, (21, 11), (2, 1))]):
        pads = [kernel[0] // 2, kernel[1] // 2] * 2
        shape = (SPEECH_FILTERS, inner, *kernel)
        weight = graph.constant(f"conv{index}", he_normal(seed, f"conv{index}", shape, fan_in=int(np.prod(shape[1:]))))
        value = graph.op("Conv", value, weight, kernel_shape=list(kernel), strides=list(strides), pads=pads)
        value = graph.op("Clip", value, graph.constant("zero", np.float32(0)), graph.constant("twenty", np.float32(20)))
        bins = (bins - 1) // strides[0] + 1
    features = SPEECH_FILTERS * bins
    value = graph.op("Transpose", value, perm=[3, 0, 1, 2])  # [frames, batch, filters, bins]
    value = graph.op("Reshape", value, graph.constant("rows", np.array([0, 0, features])))
    value, _, _ = lstm_stack(graph, seed, "lstm", value, features, stack)
    characters = he_normal(seed, "characters", (stack.hidden, SPEECH_CHARACTERS), fan_in=2 * stack.hidden)
    scores = graph.op("MatMul", value, graph.constant("characters", characters))
    graph.op("Transpose", scores, perm=[1, 0, 2], name="logits")
    graph.output("logits", (batch, (frames - 1) // 2 + 1, SPEECH_CHARACTERS))
    return graph.model({"weights": f"random, seed {seed}"})


def lstm_stack(
    graph: GraphWriter,
    seed: int,
    name: str,
    value: str,
    features: int,
    stack: Stack,
    states: Sequence[tuple[str, str]] = (),
    nodes: str = "",
) -> tuple[str, list[str], list[str]]:
    """LSTM nodes one above the other, the first over ``features``; ``states``: where each begins, if not in zeros.

    ``name`` names the weights, which stacks may share, and with ``nodes`` behind it the nodes.

    Returns the last layer's sequence [steps, batch, hidden], and every layer's last hidden and cell states
    [1, batch, hidden].
    """
    hidden_states, cell_states = [], []
    for layer in range(stack.layers):
        operands = _lstm_weights(graph, seed, f"{name}{layer}", features if layer == 0 else stack.hidden, stack.hidden)
        initial = ("", *states[layer]) if states else ()
        sequence, hidden, cell = graph.ops(
            "LSTM", value, *operands, *initial, results=3, name=f"{name}{layer}{nodes}", hidden_size=stack.hidden
        )
        value = graph.op("Squeeze", sequence, graph.constant("direction", np.array([1])))
        hidden_states.append(hidden)
        cell_states.append(cell)
    return value, hidden_states, cell_states


def _lstm_weights(graph: GraphWriter, seed: int, name: str, features: int, hidden: int) -> tuple[str, str, str]:
    """W, R and B of one direction, uniform in +-sqrt(12 / inputs).

    With half of that, ten layers forget what they were given: two random inputs differ by 1 % in the output, and an
    error would hide as well. With twice of it they are chaotic: the last bit of the input changes the whole output.
    """

    def uniform(role: str, columns: int) -> FloatArray:
        bound = np.sqrt(12.0 / columns)
        values = generator(seed, f"{name}_{role}").uniform(-bound, bound, (1, 4 * hidden, columns))
        return values.astype(np.float32)

    weight = graph.constant(f"{name}_w", uniform("w", features))
    recurrent = graph.constant(f"{name}_r", uniform("r", hidden))
    bias = graph.constant(f"{name}_b", small_normal(seed, f"{name}_b", (1, 8 * hidden)))
    return weight, recurrent, bias
