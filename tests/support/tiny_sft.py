"""TRL's SFTTrainer on tiny models, with a tokenizer and conversations made up."""

from __future__ import annotations

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer

from tiny_models import V, arguments


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words w0, w1, ... with these numbers as indices."""
    words = {f"w{index}": index for index in range(V)}
    splits = Tokenizer(models.WordLevel(words, unk_token="w1"))
    splits.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "unk_token": "w1", "eos_token": "w2"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=splits, **special)


def conversations(count: int) -> datasets.Dataset:
    """Prompts and completions of 1 to 6 words."""
    generator = torch.Generator().manual_seed(3)

    def words() -> str:
        length = int(torch.randint(1, 7, (), generator=generator))
        return " ".join(f"w{i}" for i in torch.randint(3, V, (length,), generator=generator))

    return datasets.Dataset.from_list(
        [{"prompt": words(), "completion": f" {words()}"} for _ in range(count)]
    )


def config(out, **settings) -> SFTConfig:
    shared = {"bf16": False, "gradient_checkpointing": False, "max_length": 32}
    return arguments(out, SFTConfig, **(shared | settings))


def make(out, model, data=None, **settings) -> SFTTrainer:
    peft = {"peft_config": settings.pop("peft_config", None)}
    data = conversations(8) if data is None else data
    args = config(out, **settings)
    trained_on = {"train_dataset": data, "eval_dataset": data}
    return SFTTrainer(model=model, args=args, processing_class=tokenizer(), **trained_on, **peft)


def whole_batch(trainer: SFTTrainer) -> dict[str, torch.Tensor]:
    """All examples of the trainer as it collates them."""
    return trainer.data_collator(list(trainer.train_dataset))
