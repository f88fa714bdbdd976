"""Pre-train a small language model with cross entropy, label smoothing and LABO.

    $ python examples/causal_lm.py
    115712 tokens                perplexity   scaled  confidence
    cross entropy                     44.75    44.75       0.308
    label smoothing 0.1               45.41    45.01       0.284
    LABO tau 1.05                     50.49    47.02       0.208

The text is Python's own reference manual, which comes with Python. ``fuse_head`` gives the loss to
the model, so the (tokens x vocabulary) logits are never stored in training. Perplexity is the
exponential of plain cross entropy; "scaled" is after temperature scaling on other held-out text.
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import labo
from labo.integrations.huggingface import fuse_head

VOCABULARY, BLOCK = 2048, 128


def losses(steps: int) -> dict[str, nn.Module]:
    smoothing = labo.LabelSmoothingLoss(alpha=0.1)
    return {
        "cross entropy": labo.CrossEntropyLoss(),
        "label smoothing 0.1": smoothing,
        "LABO tau 1.05": labo.Warmup(smoothing, labo.LABOLoss(tau=1.05), steps=steps // 4),
    }


def blocks() -> tuple[Tensor, Tensor, Tensor]:
    """The manual as blocks of tokens, for training, validation and test."""
    text = [topics[name] for name in sorted(topics)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text, vocab_size=VOCABULARY, show_progress=False)
    tokens = torch.tensor([token for topic in text for token in tokenizer.encode(topic).ids])
    cut = tokens[: len(tokens) // BLOCK * BLOCK].reshape(-1, BLOCK)
    order = torch.randperm(len(cut), generator=torch.Generator().manual_seed(0))
    held_out = len(cut) // 20
    return cut[order[2 * held_out :]], cut[order[:held_out]], cut[order[held_out : 2 * held_out]]


def train(loss: nn.Module, data: Tensor, steps: int, size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=BLOCK,
        tie_word_embeddings=True,
    )
    model = fuse_head(LlamaForCausalLM(config), loss)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for _ in range(steps):
        batch = data[torch.randint(len(data), (16,))]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
        if isinstance(loss, labo.Warmup):
            loss.step()
    return model.eval()


@torch.no_grad()
def predictions(model: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and the tokens that they predict."""
    logits = torch.cat([model(input_ids=part).logits[:, :-1] for part in data.split(16)])
    return logits.flatten(0, 1), data[:, 1:].flatten()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--size", type=int, default=128)
    options = parser.parse_args(arguments)
    training, validation, test = blocks()
    print(f"{training.numel()} tokens{'perplexity':>26}{'scaled':>9}{'confidence':>12}")
    for name, loss in losses(options.steps).items():
        model = train(loss, training, options.steps, options.size)
        logits, target = predictions(model, validation)
        grid = torch.linspace(0.6, 1.4, 17).tolist()
        best = min(grid, key=lambda t: cross_entropy(logits / t, target).item())
        logits, target = predictions(model, test)
        plain, scaled = (math.exp(cross_entropy(z, target)) for z in (logits, logits / best))
        confidence = logits.softmax(-1).amax(-1).mean().item()
        print(f"{name:28}{plain:11.2f}{scaled:9.2f}{confidence:12.3f}")


if __name__ == "__main__":
    main()
