"""Translation compared with other toolkits: target tokens per second, sentences per second.

Each contender runs in its own process, with the same sentences, dimensions, batch size in tokens
and number of threads. They run in turn, and medians are compared. One turn of one contender is
``python -m benchmarks.translation KIND NAME``, which prints its measurements as JSON.

Seq2SeqTrainer of Hugging Face gets the batches of labo. JoeyNMT makes its own batches. It needs a
separate environment, whose Python is named by ``JOEYNMT_PYTHON``, and is omitted without it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

THREADS = "2"


def _recipe(smoke: bool) -> Any:
    """Label smoothing on the CLDR phrases: 256/1024, 3 + 3 layers, batches of 4096 tokens."""
    from labo.lab.recipes import load_recipe

    size = ["model.preset=small", "train.batch_tokens=4096", "data.vocabulary=6000"]
    if smoke:
        size = ["model.preset=tiny", "train.batch_tokens=256", "data.size=400"]
        size += ["data.vocabulary=400"]
    return load_recipe("cldr", [*size, "method=ls", "data.data_seed=1"])


def _peak() -> int:
    from labo.lab.run.distributed import peak_memory

    return peak_memory()


class _Clock:
    """Target tokens per second, without the first steps."""

    def __init__(self, warm: int) -> None:
        self.warm, self.steps, self.tokens, self.began = warm, 0, 0, 0.0

    def step(self, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens if self.steps > self.warm else 0
        if self.steps == self.warm:
            self.began = time.perf_counter()

    def result(self) -> dict[str, float]:
        return {
            "tokens_per_second": self.tokens / (time.perf_counter() - self.began),
            "peak": _peak(),
        }


# ------------------------------------------------------------------ training


def train_labo(steps: int, smoke: bool) -> dict[str, float]:
    """The loop of ``labo train``."""
    from labo.lab.run.directory import RunDirectory
    from labo.lab.train import Trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(_recipe(smoke), RunDirectory(Path(folder) / "run"))
        clock = _Clock(warm=2)
        for batches, index in trainer.upcoming():
            trainer.update(batches, index)
            clock.step(trainer.task.count(index, batches[0].epoch))
            if clock.steps == steps + clock.warm:
                break
        return clock.result()


def train_huggingface(steps: int, smoke: bool) -> dict[str, float]:
    """Seq2SeqTrainer with label_smoothing_factor on the same model and the same batches."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

    from labo.lab.translation.task import TranslationTask

    task = TranslationTask(_recipe(smoke))
    clock = _Clock(warm=2)
    plan = [task.global_batch(0, i % task.steps_per_epoch) for i in range(steps + clock.warm)]

    class SameBatches(Seq2SeqTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return _Batches()

    class _Batches:
        def __len__(self) -> int:
            return len(plan)

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for index in plan:
                batch = task.batch(index, 0)
                mask = batch.inputs.source != 1
                yield {
                    "input_ids": batch.inputs.source,
                    "attention_mask": mask,
                    "decoder_input_ids": batch.inputs.prefix,
                    "labels": batch.target,
                }

    class Count(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step(task.count(plan[clock.steps], 0))

    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder,
            max_steps=len(plan),
            label_smoothing_factor=0.1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        model = task.build_model().marian
        SameBatches(model, arguments, train_dataset=[0], callbacks=[Count()]).train()
        return clock.result()


_JOEY = """
name: "speed"
joeynmt_version: "2.3.0"
model_dir: "model"
use_cuda: False
fp16: False
random_seed: 1
data:
    train: "train"
    {held_out}
    dataset_type: "plain"
    src: {{lang: "de", level: "word", voc_min_freq: 1, max_length: 200, voc_file: "vocab"}}
    trg: {{lang: "en", level: "word", voc_min_freq: 1, max_length: 200, voc_file: "vocab"}}
testing:
    load_model: "model/latest.ckpt"
    n_best: 1
    beam_size: 5
    beam_alpha: 1.0
    batch_size: 64
    batch_type: "sentence"
    eval_metrics: []
training:
    initializer: "xavier_uniform"
    loss: "crossentropy"
    label_smoothing: 0.1
    optimizer: "adamw"
    learning_rate: 0.001
    scheduling: "warmupinversesquareroot"
    learning_rate_warmup: 100
    batch_size: {tokens}
    batch_type: "token"
    normalization: "tokens"
    epochs: 100
    updates: {steps}
    validation_freq: 1000000
    logging_freq: 1
    shuffle: True
    num_workers: 0
model:
    tied_embeddings: True
    tied_softmax: True
    encoder: &sizes
        type: "transformer"
        num_layers: {layers}
        num_heads: 4
        embeddings: {{embedding_dim: {width}, scale: True, dropout: 0.1}}
        hidden_size: {width}
        ff_size: {ffn}
        dropout: 0.1
        layer_norm: "post"
    decoder: *sizes
"""


def _joey(folder: Path, smoke: bool, mode: str, steps: int) -> str:
    """The log of ``python -m joeynmt MODE``, run in ``folder`` on the subwords of labo."""
    from labo.lab.translation.model import MODEL_PRESETS
    from labo.lab.translation.task import TranslationTask

    task = TranslationTask(_recipe(smoke))
    sizes = MODEL_PRESETS[str(task.recipe.model.preset)]
    held_out = "valid" if mode == "train" else "test"
    _write_for_joey(task, folder, ("train", held_out) if mode == "train" else (held_out,))
    config = _JOEY.format(
        held_out=f'{"dev" if mode == "train" else "test"}: "{held_out}"',
        tokens=task.recipe.train.batch_tokens,
        steps=steps,
        **{key: sizes[key] for key in ("layers", "width", "ffn")},
    )
    (folder / "joey.yaml").write_text(config)
    command = [os.environ["JOEYNMT_PYTHON"], "-m", "joeynmt", mode, "joey.yaml"]
    command += ["--skip-test"] if mode == "train" else []
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"JoeyNMT failed: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout + done.stderr


def _child_peak() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def train_joey(steps: int, smoke: bool) -> dict[str, float]:
    """The training loop of JoeyNMT, which logs target tokens per second after every step."""
    with tempfile.TemporaryDirectory() as folder:
        log = _joey(Path(folder), smoke, "train", steps + 2)
    rates = [float(rate) for rate in re.findall(r"Tokens per Sec:\s*(\d+)", log)]
    return {"tokens_per_second": statistics.median(rates[2:]), "peak": _child_peak()}


def _write_for_joey(task: Any, folder: Path, splits: tuple[str, ...]) -> None:
    tokens = task.data.tokenizer.convert_ids_to_tokens
    for name in splits:
        pairs = task.data.split(name)
        for side, language in (("source", "de"), ("target", "en")):
            with (folder / f"{name}.{language}").open("w", encoding="utf-8") as file:
                for i in range(len(pairs)):
                    ids = getattr(pairs, side)(i).tolist()[:-1]
                    file.write(" ".join(tokens(ids)) + "\n")
    special = ["<unk>", "<pad>", "<s>", "</s>"]
    types = tokens(list(range(4, task.num_classes)))
    (folder / "vocab").write_text("\n".join([*special, *types]) + "\n", encoding="utf-8")


# ------------------------------------------------------------------ decoding


def _model_steps(smoke: bool) -> int:
    return 2 if smoke else 150


def _model_folder(smoke: bool, folder: Path) -> Path:
    """A model after a short training, so that its sentences end."""
    from labo.lab.recipes import build_recipe
    from labo.lab.train import train

    recipe = _recipe(smoke).as_document()
    recipe["train"] |= {"epochs": None, "max_steps": _model_steps(smoke)}
    train(build_recipe(recipe), folder / "run", test=False)
    if "JOEYNMT_PYTHON" in os.environ:
        (folder / "run" / "joey").mkdir()
        _joey(folder / "run" / "joey", smoke, "train", _model_steps(smoke))
    return folder / "run" / "best"


def _sources(smoke: bool) -> list[list[int]]:
    from labo.lab.translation.task import TranslationTask

    split = TranslationTask(_recipe(smoke)).data.split("test")
    return [split.source(i).tolist() for i in range(4 if smoke else len(split))]


def _timed(work: Callable[[], object], sentences: int) -> dict[str, float]:
    began = time.perf_counter()
    work()
    return {"sentences_per_second": sentences / (time.perf_counter() - began), "peak": _peak()}


def decode_labo(best: Path, smoke: bool) -> dict[str, float]:
    from transformers import MarianMTModel

    from labo.lab.translation.decoding import decode
    from labo.lab.translation.options import Decode

    model, sources = MarianMTModel.from_pretrained(best), _sources(smoke)
    return _timed(lambda: decode(model, sources, Decode()), len(sources))


def decode_huggingface(best: Path, smoke: bool) -> dict[str, float]:
    """``generate`` on batches of 32 sentences in their original order."""
    import torch
    from transformers import MarianMTModel

    model, sources = MarianMTModel.from_pretrained(best).eval(), _sources(smoke)

    def work() -> None:
        for first in range(0, len(sources), 32):
            rows = [torch.tensor(source) for source in sources[first : first + 32]]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
            longest = int(1.5 * ids.shape[1]) + 20
            model.generate(input_ids=ids, attention_mask=ids != 1, max_length=longest)

    return _timed(work, len(sources))


def decode_ctranslate2(best: Path, smoke: bool) -> dict[str, float]:
    import ctranslate2
    from transformers import AutoTokenizer

    from labo.lab.translation.export import export

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ct2"
        export(best, out)
        translator = ctranslate2.Translator(str(out), intra_threads=int(THREADS))
        tokens = AutoTokenizer.from_pretrained(best).convert_ids_to_tokens
        sources = [tokens(source) for source in _sources(smoke)]
        return _timed(
            lambda: translator.translate_batch(
                sources,
                beam_size=5,
                max_batch_size=4096,
                batch_type="tokens",
                min_decoding_length=0,
            ),
            len(sources),
        )


def decode_joey(best: Path, smoke: bool) -> dict[str, float]:
    """The beam search of JoeyNMT on its own model, trained for the same number of steps."""
    log = _joey(best.parent / "joey", smoke, "test", _model_steps(smoke))
    seconds = re.findall(r"Generation took ([\d.]+)\[sec\]", log)
    sentences = re.findall(r"Predicting (\d+) example", log)
    return {
        "sentences_per_second": float(sentences[-1]) / float(seconds[-1]),
        "peak": _child_peak(),
    }


TRAINING = {
    "labo": train_labo,
    "Seq2SeqTrainer": train_huggingface,
    "JoeyNMT": train_joey,
}
DECODING = {
    "labo": decode_labo,
    "generate": decode_huggingface,
    "CTranslate2": decode_ctranslate2,
    "JoeyNMT": decode_joey,
}


# ------------------------------------------------------------------ turns


def take_turns(smoke: bool) -> dict[str, dict[str, Any]]:
    """For training and decoding: contender -> medians over its turns."""
    steps, turns = (2, 1) if smoke else (12, 3)
    with tempfile.TemporaryDirectory() as folder:
        best = _model_folder(smoke, Path(folder))
        absent = set() if "JOEYNMT_PYTHON" in os.environ else {"JoeyNMT"}
        found: dict[str, dict[str, Any]] = {}
        for kind, contenders in (("training", TRAINING), ("decoding", DECODING)):
            names = [name for name in contenders if name not in absent]
            results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for _ in range(turns):
                for name in names:
                    results[name].append(_turn(kind, name, best, steps, smoke))
            found[kind] = {
                name: {key: statistics.median(r[key] for r in rows) for key in rows[0]}
                for name, rows in results.items()
            }
    return found


def _turn(kind: str, name: str, best: Path, steps: int, smoke: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.translation", kind, name, "--best", str(best)]
    command += ["--steps", str(steps), *(["--smoke"] if smoke else [])]
    environment = os.environ | {"OMP_NUM_THREADS": THREADS, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{kind}, {name}: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("training", "decoding"))
    parser.add_argument("name")
    parser.add_argument("--best", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--smoke", action="store_true")
    chosen = parser.parse_args()
    if chosen.kind == "training":
        measured = TRAINING[chosen.name](chosen.steps, chosen.smoke)
    else:
        measured = DECODING[chosen.name](chosen.best, chosen.smoke)
    print(json.dumps(measured))
