"""BPE-dropout: other segmentations of the same text."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from labo.lab.errors import RequestError
from labo.lab.recipes import load_recipe
from labo.lab.text.bpe_dropout import BpeDropout
from labo.lab.text.subwords import Size, learn_merges, make_tokenizer
from labo.lab.translation.task import TranslationTask

TEXT = ["the lowest newest house, isn't it?", "Das neueste Haus — 1 234,5 Häuser!", "newer  lower"]


@pytest.fixture(scope="module", params=[True, False], ids=["words", "bytes"])
def tokenizer(request):
    size = Size(merges=60) if request.param else Size(vocabulary=330)
    merges = learn_merges(lambda: TEXT * 4, words=request.param, size=size, reserved=5)
    return make_tokenizer(merges, ["<de>"])


def encode(tokenizer, line):
    (found,) = tokenizer.backend_tokenizer.encode_batch([line])
    return found.ids


@pytest.mark.parametrize("line", [TEXT[1], TEXT[2], "", "<de> the unknown ☃ house"])
def test_segmentations_of_a_line(tokenizer, line):
    ids = encode(tokenizer, line)
    assert BpeDropout(tokenizer, 0.0)(ids, Random(0)) == ids
    for seed in range(5):
        other = BpeDropout(tokenizer, 0.4)(ids, Random(seed))
        assert tokenizer.decode(other) == tokenizer.decode(ids)
        assert len(other) >= len(ids)
        assert other == BpeDropout(tokenizer, 0.4)(ids, Random(seed))


def test_the_share_of_merges_grows_smaller(tokenizer):
    ids = encode(tokenizer, TEXT[0])
    lengths = [
        sum(len(BpeDropout(tokenizer, p)(ids, Random(seed))) for seed in range(30)) / 30
        for p in (0.0, 0.1, 0.5, 1.0)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[1] < lengths[2] < lengths[3]
    assert lengths[0] == len(ids)
    atoms = BpeDropout(tokenizer, 1.0)(ids, Random(0))
    assert BpeDropout(tokenizer, 0.0)(atoms, Random(0)) == ids


def test_other_encodings_are_refused():
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    with pytest.raises(RequestError, match="needs a byte-pair encoding, not WordLevel"):
        BpeDropout(PreTrainedTokenizerFast(tokenizer_object=words), 0.1)


def test_training_batches_are_segmented_anew_in_each_epoch(tmp_path, monkeypatch):
    monkeypatch.setenv("LABO_CACHE", str(tmp_path))
    settings = ["data.size=200", "data.vocabulary=400", "train.batch_tokens=256"]
    task = TranslationTask(load_recipe("cldr", [*settings, "data.bpe_dropout=0.2"]))
    again = TranslationTask(load_recipe("cldr", [*settings, "data.bpe_dropout=0.2"]))
    usual = TranslationTask(load_recipe("cldr", settings))
    index = task.global_batch(0, 3)
    first, second = task.batch(index, 0), task.batch(index, 1)
    assert first.target.shape != second.target.shape or not torch.equal(first.target, second.target)
    # The segmentation of a sentence depends on seed, epoch and sentence alone.
    alone = again.batch(index[-1:], 0).target[0]
    assert torch.equal(alone, first.target[-1][: len(alone)])
    for epoch, batch in enumerate((first, second)):
        assert task.count(index, epoch) == (batch.target != -100).sum() > usual.count(index, epoch)
        said = [
            [task.data.target_tokenizer.decode(row[row != -100]) for row in found.target]
            for found in (batch, usual.batch(index, epoch))
        ]
        assert said[0] == said[1]
