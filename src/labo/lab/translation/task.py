"""Translation: prepared parallel text, a Transformer, beam search and BLEU.

A batch consists of sentences of similar length, as many as fit into ``train.batch_tokens`` with
padding counted. The batches are fixed for a run; each epoch uses them in another order. The loss is
computed from hidden states and output layer by :func:`labo.linear_loss`, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from ..._names import unknown_name
from .. import config
from ..errors import RequestError
from ..pretrained import StartingModel, folder_digest
from ..run.progress import track
from ..run.seeds import mix, uniforms
from ..tasks import Batch, Evaluation
from ..text import forced
from ..text.batching import by_length, padded_rows, rounded, text_digest, training_batches
from ..text.bpe_dropout import BpeDropout
from ..text.pretrained_tokenizer import vocabulary_digest, vocabulary_size
from ..text.task import TokenTask
from . import batches, bleu
from .decoding import Hypothesis, decode, generation_config
from .model import (
    EOS,
    MODEL_PRESETS,
    NUM_SPECIAL,
    EncoderDecoder,
    fitting_config,
    fresh_translator,
    load_translator,
    marian_config,
    positions_of,
    start_tokens,
    target_types,
)
from .options import MAX_TYPES, Decode
from .prepared import Prepared, Side, TextSplit
from .text import Pipeline
from .translate import ModelFolder


class TextData(config.Section):
    """The text: the built-in CLDR phrases, or a folder made by ``labo prepare``."""

    name: Literal["cldr", "prepared"] = Field(
        description="`cldr`: built-in phrases from the Unicode CLDR. `prepared`: a folder made by "
        "`labo prepare`."
    )
    path: str | None = Field(None, description="With `prepared`: the folder.")
    languages: config.Names = Field(
        (), description="With `cldr`: one or several of de-en, en-de, fr-en and en-fr."
    )
    size: int = Field(
        20_000, ge=100, le=10_000_000, description="With `cldr`: the number of training pairs."
    )
    data_seed: int = Field(0, ge=0, description="With `cldr`: the seed of the phrases.")
    vocabulary: int = Field(
        2000, ge=300, le=MAX_TYPES, description="With `cldr`: the size of the vocabulary."
    )
    switchout_source: float = Field(
        0.0,
        ge=0,
        description="SwitchOut (Wang et al. 2018) on the source: temperature of the number of "
        "replaced words; 0 is off.",
    )
    switchout_target: float = Field(0.0, ge=0, description="SwitchOut on the target, likewise.")
    bpe_dropout: float = Field(
        0.0,
        ge=0,
        le=1,
        description="BPE-dropout (Provilkov et al. 2020) of both sides: the probability that a "
        "merge is left out, anew in each epoch; 0 is off, 0.1 is usual. Sentences get longer than "
        "`train.batch_tokens` counts.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> TextData:
        if (self.name == "prepared") != (self.path is not None):
            raise ValueError(
                "name=prepared needs path=FOLDER, made by `labo prepare`; name=cldr takes no path"
            )
        if (self.name == "cldr") != bool(self.languages):
            raise ValueError("name=cldr needs languages, such as [de-en]; name=prepared takes none")
        return self

    def unused(self) -> dict[str, str]:
        of_phrases = ("size", "data_seed", "vocabulary") if self.name == "prepared" else ()
        return dict.fromkeys(of_phrases, "name=prepared")


class TextModel(StartingModel):
    """The Transformer: a preset and what differs from it, or a pre-trained model.

    Encoder-decoders to start from are Marian, T5, BART, mBART, M2M100 or NLLB, for example.
    """

    preset: str | None = Field(
        None,
        description="The dimensions (width/ffn, heads, layers): "
        + ", ".join(
            f"{name} ({p['width']}/{p['ffn']}, {p['heads']}, {p['layers']}+{p['layers']})"
            for name, p in MODEL_PRESETS.items()
        )
        + ".",
    )
    width: int | None = Field(
        None, ge=2, description="Width of embeddings and layers. null: as in the preset."
    )
    ffn: int | None = Field(
        None, ge=1, description="Width inside the feed-forward layers. null: as in the preset."
    )
    heads: int | None = Field(None, ge=1, description="Attention heads. null: as in the preset.")
    encoder_layers: int | None = Field(
        None, ge=1, description="Layers of the encoder. null: as in the preset."
    )
    decoder_layers: int | None = Field(
        None, ge=1, description="Layers of the decoder. null: as in the preset."
    )
    dropout: float = Field(
        0.1, ge=0, lt=1, description="Dropout on embeddings and on the outputs of sublayers."
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on attention weights.")
    activation_dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout inside the feed-forward layers."
    )
    embeddings: Literal["shared", "decoder", "separate"] = Field(
        "shared",
        description="Tied matrices: source, target and output layer (`shared`), target and output "
        "layer (`decoder`), or none (`separate`).",
    )
    fixnorm: bool = Field(
        False, description="Use word embeddings of length 1 (Nguyen and Chiang 2018)."
    )
    positions: int = Field(1024, ge=8, description="The longest sentence, in tokens.")

    @field_validator("preset")
    @classmethod
    def _known(cls, preset: str | None) -> str | None:
        if preset is not None and preset not in MODEL_PRESETS:
            raise ValueError(unknown_name("preset", preset, MODEL_PRESETS))
        return preset

    @model_validator(mode="after")
    def _consistent(self) -> TextModel:
        if self.pretrained is not None:
            start = StartingModel.model_fields
            defaults = {n: f.default for n, f in TextModel.model_fields.items() if n not in start}
            if given := [n for n, default in defaults.items() if getattr(self, n) != default]:
                raise ValueError(
                    f"{', '.join(given)}: a pretrained model has its own "
                    "(model={pretrained: FOLDER} leaves out what the recipe says)"
                )
            return self
        if self.lora is not None:
            raise ValueError("lora: adapters are for a pretrained model")
        width, heads = self.dimensions()["width"], self.dimensions()["heads"]
        if width % heads or width % 2:
            raise ValueError(f"width {width} must be even and divisible by heads {heads}")
        if self.fixnorm and self.embeddings == "separate":
            raise ValueError("fixnorm needs embeddings=shared or embeddings=decoder")
        return self

    def dimensions(self) -> dict[str, Any]:
        """Those of the preset, with what differs from it."""
        preset = MODEL_PRESETS[str(self.preset)]
        layers = {"encoder_layers": preset["layers"], "decoder_layers": preset["layers"]}
        values = {name: preset[name] for name in ("width", "ffn", "heads")} | layers
        return {name: getattr(self, name) or value for name, value in values.items()}


class TextTrain(config.Train):
    """The training loop of translation."""

    batch_tokens: int = Field(
        ge=16,
        description="Tokens per optimizer step: sentences times the longest side, padding "
        "included, over all processes and micro-batches.",
    )
    select: Literal["bleu", "nll"] = Field(
        "bleu", description="The score on the validation split that selects the model."
    )
    select_beam: int = Field(
        1,
        ge=1,
        description="Beam size of the BLEU that selects the model. The score is called "
        "`greedy_bleu` if it is 1, else `beam_bleu`.",
    )
    select_sentences: int | None = Field(
        None,
        ge=1,
        description="Sentences of the validation split that are decoded for the BLEU that selects "
        "the model, evenly spaced; null decodes all.",
    )


class TextRecipe(config.Recipe):
    """A recipe for translation."""

    data: TextData
    model: TextModel
    train: TextTrain
    decode: Decode = Decode()

    @model_validator(mode="after")
    def _beam_fits(self) -> TextRecipe:
        Decode.model_validate(self.decode.model_dump() | {"beam": self.train.select_beam})
        return self

    @property
    def selected_by(self) -> str:
        """BLEU during training is named apart from that of the final beam search."""
        if self.train.select != "bleu":
            return self.train.select
        return "greedy_bleu" if self.train.select_beam == 1 else "beam_bleu"


class TranslationTask(TokenTask):
    """Translation: data, model and scores."""

    Recipe = TextRecipe
    data: Prepared
    higher_is_better: ClassVar = {"bleu": True, "nll": False}
    provides: ClassVar = frozenset({"vocabulary_groups", "inner_states", "stored_teacher"})
    method_defaults: ClassVar = {
        **TokenTask.method_defaults,
        "labo": {"warmup_steps": 5000},
        # That of the authors' translation code.
        "r-drop": {"lam": 5.0, "hard_weight": 1.0, "label": "smoothed"},
    }

    def __init__(self, recipe: TextRecipe) -> None:
        self.recipe = recipe
        self.data = self._load(recipe.data)
        self.fingerprint = f"{recipe.data.name}@{self.data.fingerprint[:12]}"
        self.data.hold()
        tokenizers = self.data.tokenizer, self.data.target_tokenizer
        self.vocabularies = vocabulary_size(tokenizers[0]), vocabulary_size(tokenizers[1])
        self.num_classes = self.vocabularies[1]
        self._positions = recipe.model.positions
        self._starts = torch.full((len(self.data.pairs), 1), EOS)  # (directions, given tokens)
        if recipe.model.pretrained is not None:
            self._take_up(recipe.model.pretrained)
        elif self.data.pretrained:
            raise RequestError(
                f"{self.data.path} was prepared with the tokenizer of a pre-trained model: set "
                "model.pretrained to its folder"
            )
        elif recipe.model.embeddings == "shared" and not self.data.joint:
            raise RequestError(
                "model.embeddings: shared needs one vocabulary, but this data has two; set it to "
                "decoder or separate"
            )
        for split in ("valid", "test"):
            self._check_lengths(split)
        self._train = self.data.split("train")
        plan, left_out = self._make_batches()
        self.set_batches(plan)
        self.size = self.samples = len(self._train)
        self.notes = [*left_out, *self.method_notes()]
        self._dropout: dict[Side, BpeDropout] = {}
        if recipe.data.bpe_dropout:
            self._dropout = {
                "source": BpeDropout(self.data.tokenizer, recipe.data.bpe_dropout),
                "target": BpeDropout(self.data.target_tokenizer, recipe.data.bpe_dropout),
            }
        # A sentence is counted and batched: it is segmented once for both.
        self._segmented = lru_cache(maxsize=1 << 14)(self._segment)

    @staticmethod
    def _load(options: TextData) -> Prepared:
        if options.path is not None:
            return Prepared(options.path)
        from .cldr import cldr_data

        size, seed, vocabulary = options.size, options.data_seed, options.vocabulary
        return cldr_data(options.languages, size=size, seed=seed, vocabulary=vocabulary)

    # ------------------------------------------------------------------ the model

    def _take_up(self, folder: str) -> None:
        """Take the special tokens and sizes of a pre-trained model; refuse what does not fit."""
        settings = fitting_config(folder, self.data)
        for name in ("switchout_source", "switchout_target", "bpe_dropout"):
            if self.data.pretrained and getattr(self.recipe.data, name):
                raise RequestError(
                    f"data.{name}: only for subwords that `labo prepare` learned, not for those of "
                    "a pre-trained model"
                )
        self.num_classes = target_types(settings)
        self.fingerprint += f"~{folder_digest(folder)}"
        self._positions = positions_of(settings)
        self._starts = torch.tensor([start_tokens(settings, pair) for pair in self.data.pairs])

    def _check_lengths(self, split: str) -> None:
        """Refuse sentences to score that the model cannot take."""
        longest = int(self.data.split(split).longest(self._given).max())
        if longest > self._positions:
            where = "the model" if self.recipe.model.pretrained else "model.positions"
            raise RequestError(
                f"{where} has {self._positions} positions, but {self.data.path} has a sentence of "
                f"{longest} tokens in the {split} split"
            )

    @property
    def _given(self) -> int:
        """Tokens that the decoder is given before a target, besides its start token."""
        return self._starts.shape[1] - 1

    def build_model(self) -> EncoderDecoder:
        options = self.recipe.model
        model: EncoderDecoder
        if options.pretrained is not None:
            model = load_translator(options.pretrained)
        else:
            names = "dropout", "attention_dropout", "activation_dropout", "embeddings", "positions"
            settings = options.dimensions() | {name: getattr(options, name) for name in names}
            config = marian_config(self.vocabularies, **settings)
            model = fresh_translator(config, fixnorm=options.fixnorm)
        self.prepare_model(model)
        return model

    @staticmethod
    def load_model(folder: Path) -> EncoderDecoder:
        return ModelFolder(folder).load()

    def facts(self) -> dict[str, Any]:
        """The facts that are saved with the model, besides its dimensions."""
        target = self.data.target_tokenizer
        return {
            "task": self.recipe.task,
            "num_classes": self.num_classes,
            "vocabulary": vocabulary_digest(target)
            if self.data.pretrained
            else text_digest(target.backend_tokenizer.to_str()),
            "pairs": [pair.entry() for pair in self.data.pairs],
            "text": self.data.manifest["text"],
            "decode": self.recipe.decode.model_dump(mode="json"),
        }

    def model_files(
        self, model: nn.Module, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, str | bytes]]:
        assert isinstance(model, EncoderDecoder)
        # With several target languages a caller of generate names the one that is wanted.
        start = self._starts[0] if len(self._starts.unique(dim=0)) == 1 else self._starts[0, :1]
        config = model.plain().config
        generation = generation_config(self.recipe.decode, config, start=start.tolist())
        return self.folder_files(model, weights, generation.to_json_string())

    def stored_teacher(self, folder: str) -> tuple[str, Callable[[Batch], tuple[Tensor, Tensor]]]:
        for name in ("bpe_dropout", "switchout_target"):
            if getattr(self.recipe.data, name):
                raise RequestError(
                    f"data.{name} changes the targets, and predictions are stored for those of "
                    "the text: set it to 0, or use method=kd, which runs the teacher beside"
                )
        return super().stored_teacher(folder)

    def stored_places(self, batch: Batch) -> Iterator[tuple[int, slice]]:
        return ((sentence, slice(None)) for sentence in batch.index.tolist())

    def target_tokenizer(self) -> Any:
        return self.data.target_tokenizer

    # ------------------------------------------------------------------ training batches

    def _make_batches(self) -> tuple[list[Tensor], list[str]]:
        """The sentences of each batch, the same in every epoch, and notes for the user."""
        limit = self.recipe.train.batch_tokens
        longest = torch.from_numpy(self._train.longest(self._given))
        fits = longest <= min(limit, self._positions)
        if not fits.any():
            raise RequestError(f"train.batch_tokens: no training pair fits into {limit} tokens")
        plan = training_batches(longest, fits, limit, self.recipe.seed)
        missing = int((~fits).sum())
        notes = [f"{missing} training pairs are too long for a batch and are not used"]
        return plan, notes if missing else []

    def count(self, index: Tensor, epoch: int) -> int:
        if self._dropout:
            return sum(len(self._segmented("target", i, epoch)) for i in index.tolist())
        return int(self._train.lengths("target")[index.numpy()].sum())

    def batch(self, index: Tensor, epoch: int) -> Batch:
        return self._batch(self._train, index, epoch, training=True)

    def _segment(self, side: Side, sample: int, epoch: int) -> list[int]:
        """The ids of a training sentence under BPE-dropout, if the model has room for them."""
        usual = getattr(self._train, side)(sample).tolist()
        draws = Random(mix(self.recipe.seed, f"bpe dropout of {side}", epoch, sample))
        dropped = self._dropout[side](usual, draws)
        return dropped if len(dropped) <= self._positions else usual

    def _batch(self, split: TextSplit, index: Tensor, epoch: int, *, training: bool) -> Batch:
        sides = {}
        names: tuple[Side, Side] = ("source", "target")
        for name, size in zip(names, self.vocabularies, strict=True):
            rows: list[Any]
            if training and self._dropout:
                rows = [self._segmented(name, sample, epoch) for sample in index.tolist()]
            else:
                rows = [split.sides[name].part(sample) for sample in index.tolist()]
            ids = padded_rows(rows, self.data.pad)
            temperature = getattr(self.recipe.data, f"switchout_{name}")
            if training and temperature:
                draws = uniforms(
                    self.recipe.seed, epoch, index, 1 + 2 * ids.shape[1], stream=f"switch {name}"
                )
                ids = switchout(ids, draws, temperature, self._first_type, size)
            sides[name] = ids
        start = self._starts[torch.from_numpy(split.pair[index.numpy()]).long()]
        inputs, labels = batches.forced(sides["source"], sides["target"], start, self.data.pad)
        return Batch(inputs, labels, index, epoch)

    @property
    def _first_type(self) -> int:
        """The first id of a subword; special tokens and tags come before it."""
        tags = {pair.tag for pair in self.data.pairs if pair.tag}
        return NUM_SPECIAL + len(tags)

    def vocabulary_groups(self) -> Tensor:
        """(V,) group of each type: 0 target only, 1 common, 2 source only.

        Special tokens and types that do not occur in the training text are common.
        """
        if not self.data.joint:
            raise RequestError(
                "mls and wls need one vocabulary for both languages: labo prepare --share all"
            )
        source, target = (self.data.frequencies(side) > 0 for side in ("source", "target"))
        groups = torch.ones(self.num_classes, dtype=torch.int64)
        groups[np.flatnonzero(target & ~source)] = 0
        groups[np.flatnonzero(source & ~target)] = 2
        groups[self._special] = 1
        return groups

    @property
    def _special(self) -> list[int]:
        """The ids of special tokens and tags."""
        if not self.data.pretrained:
            return [*range(self._first_type)]
        frames = [pair.frame for pair in self.data.pairs if pair.frame is not None]
        around = [i for frame in frames for i in (*frame.before, *frame.after)]
        return sorted({*self.data.tokenizer.all_special_ids, *around})

    # ------------------------------------------------------------------ scores

    def validate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        split, train = self.data.split("valid"), self.recipe.train
        references = self.forced_rows(model, "valid", accelerator)
        metrics = forced.mean_metrics([row for _, row in references])
        if train.select == "bleu":
            if train.select_sentences is not None and train.select_sentences < len(split):
                number = np.arange(train.select_sentences)
                split = split.take(number * len(split) // train.select_sentences)
            options = self.recipe.decode.with_beam(train.select_beam)
            hypotheses = self._decode(model, split, accelerator, options)
            scores = self._scores(split, self._texts(split, hypotheses))
            metrics |= {self.recipe.selected_by: scores["bleu"]}
        return metrics

    def scored_by(self) -> dict[str, str]:
        return bleu.signatures(self.data.text.lowercase)

    def evaluate(  # type: ignore[override]  # the options are those of this task
        self,
        model: nn.Module,
        split: str,
        accelerator: Accelerator,
        *,
        beams: Sequence[int] = (),
        temperature: float | None = None,
    ) -> Evaluation:
        chosen = self.data.split(split)
        rows = self.forced_rows(model, split, accelerator, temperature)
        references = [row for _, row in rows]
        hypotheses = self._decode(model, chosen, accelerator, self.recipe.decode)
        texts = self._texts(chosen, hypotheses)
        metrics = self._scores(chosen, texts) | forced.mean_metrics(references)
        said, wanted = sum(len(h.ids) + 1 for h in hypotheses), chosen.lengths("target").sum()
        metrics["length_ratio"] = said / int(wanted)
        by_beam = {
            beam: self._decode(model, chosen, accelerator, self.recipe.decode.with_beam(beam))
            for beam in beams
        }
        records = self._records(chosen, references, temperature, hypotheses, texts, by_beam)
        return Evaluation(metrics, records, {"sacrebleu": self.scored_by()})

    @cached_property
    def _pipelines(self) -> list[Pipeline]:
        return [Pipeline(self.data.text, pair.source, pair.target) for pair in self.data.pairs]

    def _texts(self, split: TextSplit, hypotheses: Sequence[Hypothesis]) -> list[str]:
        """Detokenized translations."""
        decode = self.data.target_tokenizer.batch_decode
        plain = decode([list(h.ids) for h in hypotheses], skip_special_tokens=True)
        numbered = zip(split.pair.tolist(), plain, strict=True)
        return [self._pipelines[pair].restore(text) for pair, text in numbered]

    def _scores(self, split: TextSplit, texts: Sequence[str]) -> dict[str, float]:
        references = [split.target_text(i) for i in range(len(split))]
        pair = split.pair.tolist()
        scores = bleu.scores_with_tokens(texts, references, [self._pipelines[p] for p in pair])
        if len(self._pipelines) > 1:
            for number, named in enumerate(self.data.pairs):
                mine = [i for i, p in enumerate(pair) if p == number]
                said, wanted = ([side[i] for i in mine] for side in (texts, references))
                score = bleu.scores(said, wanted, self.data.text.lowercase)["bleu"]
                scores[f"bleu_{named.source}_{named.target}"] = score
        return scores

    def _shares(self, split: TextSplit, accelerator: Accelerator) -> list[int]:
        """The sentences that this process scores."""
        return list(range(accelerator.process_index, len(split), accelerator.num_processes))

    def _decode(
        self, model: nn.Module, split: TextSplit, accelerator: Accelerator, options: Decode
    ) -> list[Hypothesis]:
        assert isinstance(model, EncoderDecoder)
        mine, plain = self._shares(split, accelerator), model.plain()
        starts = [tuple(self._starts[pair].tolist()) for pair in split.pair]
        best: list[tuple[int, Hypothesis]] = []
        with track(f"decoding, beam {options.beam}", len(mine)) as advance:
            for start in dict.fromkeys(starts):  # one search for all that start alike
                part = [i for i in mine if starts[i] == start]
                sources = [split.source(i).tolist() for i in part]
                decoded = decode(plain, sources, options, start=start, advance=advance)
                best += zip(part, (hypotheses[0] for hypotheses in decoded), strict=True)
        return [hypothesis for _, hypothesis in sorted(gather_object(best), key=itemgetter(0))]

    def scored_batches(
        self, split: str, accelerator: Accelerator, *, sampled: bool = False
    ) -> Iterator[tuple[list[int], list[int], Batch]]:
        chosen = self.data.split(split)
        mine = np.asarray(self._shares(chosen, accelerator))
        with track("scoring references", len(mine)) as advance:
            for batch_of in by_length(chosen.longest()[mine].tolist()):
                part = mine[batch_of]
                batch = self._batch(chosen, torch.from_numpy(part), 0, training=False)
                yield part.tolist(), self.learned(batch).sum(-1).tolist(), batch
                advance(len(part))

    def _records(
        self,
        split: TextSplit,
        references: Sequence[Mapping[str, Tensor]],
        temperature: float | None,
        hypotheses: Sequence[Hypothesis],
        texts: Sequence[str],
        by_beam: Mapping[int, Sequence[Hypothesis]],
    ) -> Iterator[dict[str, Any]]:
        """One record per sentence."""
        counts = self.data.frequencies("source")
        if self.data.joint:  # counts of the joint dictionary, as in the source of the paper
            counts = counts + self.data.frequencies("target")
        names = self.data.tokenizer.convert_ids_to_tokens
        special = set(self._special)
        for index, (hypothesis, text) in enumerate(zip(hypotheses, texts, strict=True)):
            pair = self.data.pairs[int(split.pair[index])]
            source = [int(i) for i in split.source(index) if int(i) not in special]
            reference = split.target(index).tolist()
            end = [self.data.end] * hypothesis.ended
            record: dict[str, Any] = {
                "index": index,
                "pair": str(pair),
                "source": split.source_text(index),
                "reference": split.target_text(index),
                "hypothesis": text,
                "source_tokens": names(source),
                "tokens": self.token_texts([*hypothesis.ids, *end]),
                "probabilities": rounded(hypothesis.probabilities),
                "score": hypothesis.score,
                "frequency": float(counts[source].mean()) if source else 0.0,
                "forced": forced.forced_record(
                    self.token_texts(reference), references[index], temperature
                ),
                "reference_length": len(reference),
            }
            if by_beam:
                record["lengths"] = {str(b): len(by_beam[b][index].ids) + 1 for b in by_beam}
            yield record

    def examples(self, model: nn.Module, split: str, accelerator: Accelerator) -> dict[str, Any]:
        chosen = self.data.split(split)
        index = torch.arange(min(len(chosen), 64))
        batch = self._batch(chosen, index, 0, training=False).to(accelerator.device)
        lengths = chosen.lengths("target")
        places = [(i, position) for i in index.tolist() for position in range(lengths[i])]

        def describe(sentence: int) -> tuple[Any, str, str]:
            source = chosen.source_text(sentence)
            return chosen.target(sentence), f"sentence {sentence + 1}", f"{source} = "

        return self.competing(model, batch, places, describe)


TASK = TranslationTask


def switchout(ids: Tensor, u: Tensor, temperature: float, first: int, size: int) -> Tensor:
    r"""SwitchOut: replace some subwords by others, drawn uniformly from the vocabulary.

    The number of replaced subwords :math:`k \in \{0 .. L\}` of a sentence of L subwords (without
    its end) has :math:`P(k) \propto \exp(-k / temperature)`. Each subword is then replaced with
    probability k / L by any other subword. Special tokens and tags are kept: the ids of subwords
    are first .. size - 1. ``ids`` are (N, T), the random numbers ``u`` (N, 1 + 2 T).
    """
    words = (ids >= first) & (ids < size)
    count = words.sum(-1)
    number = torch.arange(ids.shape[1] + 1)
    weight = (-number / temperature).exp() * (number <= count.unsqueeze(-1))
    below = weight.cumsum(-1) / weight.sum(-1, keepdim=True)
    k = (u[:, :1] >= below).sum(-1).clamp(max=int(count.max()))
    replaced = words & (u[:, 1 : 1 + ids.shape[1]] * count.unsqueeze(-1) < k.unsqueeze(-1))
    # Any other subword: a step of 1 .. size - first - 1, modulo their number.
    steps = 1 + (u[:, 1 + ids.shape[1] :] * (size - first - 1)).long().clamp(max=size - first - 2)
    other = first + (ids - first + steps) % (size - first)
    return torch.where(replaced, other, ids)
