"""Beam search: against one written out in plain Python, and in batches of any kind."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from labo.lab.errors import RequestError
from labo.lab.translation import decoding
from labo.lab.translation.decoding import decode, generation_config, longest_output
from labo.lab.translation.model import BOS, EOS, PAD
from labo.lab.translation.options import Decode
from tiny_translation import (
    POSITIONS,
    VOCABULARY,
    random_model,
    save_folder,
    sentences,
    trained_model,
    word_tokenizer,
)

SUPPRESSED = (BOS, PAD)


def oracle(model, source, options):
    """The beam search of the documentation, a sentence and a step at a time, without a cache."""
    longest = longest_output(len(source), options, POSITIONS)
    running, finished = [(0.0, (EOS,))], []
    for length in range(1, longest + 1):
        candidates = []
        for score, prefix in running:
            with torch.no_grad():
                logits = model(
                    torch.tensor([source]), decoder_input_ids=torch.tensor([prefix])
                ).logits[0, -1]
            for token, log_p in enumerate(logits.log_softmax(-1).tolist()):
                too_short = token == EOS and length <= options.min_length
                if token not in SUPPRESSED and not too_short:
                    candidates.append((score + log_p, (*prefix, token)))
        candidates.sort(key=lambda candidate: -candidate[0])
        running = []
        for rank, (score, prefix) in enumerate(candidates[: 2 * options.beam]):
            if prefix[-1] == EOS or length == longest:
                if rank < options.beam:
                    finished.append((score / length**options.length_penalty, prefix[1:]))
            elif len(running) < options.beam:
                running.append((score, prefix))
        if len(finished) >= options.beam:
            break
    return sorted(finished, key=lambda hypothesis: -hypothesis[0])[: options.beam]


@pytest.mark.parametrize(
    ("beam", "penalty", "embeddings"),
    [
        (1, 1.0, "shared"),
        (2, 0.0, "shared"),
        (5, 0.6, "separate"),
        (9, 2.0, "shared"),
    ],
)
def test_beam_search_finds_what_a_plain_one_finds(beam, penalty, embeddings):
    options = Decode(beam=beam, length_penalty=penalty, max_ratio=1.0, max_extra=3)
    seen = set()
    for seed, ending in enumerate([0.0, 3.0, 6.0]):
        model = random_model(embeddings=embeddings, seed=seed, ending=ending)
        sources = sentences(2, seed=seed)
        decoded = decode(model, sources, options, nbest=beam)
        for source, hypotheses in zip(sources, decoded, strict=True):
            expected = oracle(model, source, options)
            for found, (score, ids) in zip(hypotheses, expected, strict=True):
                assert (*found.ids, *[EOS] * found.ended) == ids
                assert found.score == pytest.approx(score, abs=1e-5)
                seen.add(found.ended)
    assert seen == {True, False}


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("min_length", [0, 1, 3])
def test_an_output_has_at_least_so_many_tokens(min_length, beam):
    """As in fairseq: with the default of 1 no output is empty, nor takes a beam by being so."""
    model, sources = random_model(ending=12.0), sentences(6, seed=2)
    options = Decode(beam=beam, min_length=min_length)
    found = decode(model, sources, options, nbest=beam)
    assert min(len(best.ids) for best, *_ in found) == min_length
    for source, hypotheses in zip(sources, found, strict=True):
        expected = oracle(model, source, options)
        assert [(*h.ids, *[EOS] * h.ended) for h in hypotheses] == [ids for _, ids in expected]
    assert Decode().min_length == 1


def test_beams_that_no_memory_holds_are_refused():
    with pytest.raises(ValueError, match="beam of 100000 needs batch_tokens"):
        Decode(beam=100_000)
    assert Decode(beam=100_000, batch_tokens=100_000).beam == 100_000
    with pytest.raises(RequestError, match="beam of 5000 needs batch_tokens"):
        Decode().with_beam(5000)
    with pytest.raises(ValueError, match="min_length must not be larger than max_extra"):
        Decode(min_length=30)


@pytest.mark.parametrize("batch_tokens", [1, 100, 10_000])
def test_a_translation_does_not_hang_on_its_batch(batch_tokens):
    model, sources = random_model(seed=3), sentences(20, seed=3)
    options = Decode(max_ratio=0.7, max_extra=2, batch_tokens=batch_tokens)
    together = decode(model, sources, options, nbest=3)
    for source, hypotheses in zip(sources, together, strict=True):
        (alone,) = decode(model, [source], options, nbest=3)
        assert [h.ids for h in alone] == [h.ids for h in hypotheses]
        for one, other in zip(alone, hypotheses, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-5)
            assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_probabilities_are_the_models_own(monkeypatch):
    """They are not those of the search, which never says <s> or <pad>; in small pieces too."""
    model, source = random_model(), sentences(1, seed=9)[0]
    (whole,) = decode(model, [source], Decode(), nbest=5)
    monkeypatch.setattr(decoding, "_SCORED_LOGITS", 1)
    (pieces,) = decode(model, [source], Decode(), nbest=5)
    for found, again in zip(whole, pieces, strict=True):
        assert found.probabilities == pytest.approx(again.probabilities)
        prefix = torch.tensor([[EOS, *found.ids]])
        with torch.no_grad():
            p = model(torch.tensor([source]), decoder_input_ids=prefix).logits[0].softmax(-1)
        said = [*found.ids, EOS]
        expected = [p[place, token].item() for place, token in enumerate(said)]
        assert found.probabilities == pytest.approx(expected[: len(found.probabilities)], rel=1e-5)


@pytest.mark.parametrize("beam", [1, 5])
def test_each_sentence_has_its_own_longest_output(beam):
    model = random_model()
    model.final_logits_bias[0, EOS] = -1e4
    sources = [[5, EOS], [5, 6, 7, 8, EOS], [EOS]]
    options = Decode(beam=beam, max_ratio=2.0, max_extra=1)
    found = [best for (best, *_) in decode(model, sources, options)]
    assert [len(best.ids) for best in found] == [5, 11, 3]
    assert not any(best.ended for best in found)
    ((best, *_),) = decode(model, [[5] * (POSITIONS - 1) + [EOS]], Decode(beam=beam))
    assert len(best.ids) == POSITIONS - 1


@pytest.mark.parametrize("beam", [1, 5])
def test_start_and_padding_are_never_said(beam):
    model = random_model()
    model.final_logits_bias[0, list(SUPPRESSED)] = 30.0
    for hypotheses in decode(model, sentences(5), Decode(beam=beam), nbest=beam):
        for found in hypotheses:
            assert not {BOS, PAD, EOS} & set(found.ids)


def test_order_is_kept_and_progress_told():
    model, sources, done = random_model(), sentences(11), []
    options = Decode(beam=2, batch_tokens=60)
    found = decode(model, sources, options, advance=done.append)
    assert sum(done) == 11
    assert len(done) > 2
    backwards = decode(model, sources[::-1], options)
    assert [h[0].ids for h in found] == [h[0].ids for h in backwards[::-1]]
    assert len({h[0].ids for h in found}) > 3
    assert decode(model, [], options) == []


def test_the_mode_of_the_model_is_restored_whatever_happens():
    model = random_model()
    model.config.dropout = 0.5
    for mode in (True, False):
        model.train(mode)
        first, second = (decode(model, sentences(3), Decode()) for _ in range(2))
        assert first == second
        assert all(module.training is mode for module in model.modules())

    def fail(count):
        raise KeyboardInterrupt

    model.train()
    with pytest.raises(KeyboardInterrupt):
        decode(model, sentences(3), Decode(), advance=fail)
    assert model.training


def test_more_hypotheses_than_the_beam_has_are_refused():
    with pytest.raises(RequestError, match="nbest must be 1 to 5, the beam size; got 6"):
        decode(random_model(), [[EOS]], Decode(), nbest=6)


def test_a_saved_folder_translates_the_same_with_transformers_alone(tmp_path):
    options = Decode(beam=4, length_penalty=0.7, max_extra=POSITIONS)
    folder = save_folder(
        tmp_path / "best", trained_model(), word_tokenizer("abcdefghij"), decode=options
    )
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["abc d", "e", "jij ff a", ""]
    sources = [word_tokenizer("abcdefghij").encode(text) for text in texts]
    for text, (best,) in zip(texts, decode(trained_model(), sources, options), strict=True):
        (said,) = model.generate(**tokenizer(text, return_tensors="pt"))
        assert said.tolist() == [EOS, *best.ids, EOS]


def test_transformers_has_nothing_to_remark(caplog, monkeypatch):
    """Whatever search the model was saved with."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = random_model()
    model.generation_config = generation_config(Decode(length_penalty=0.6), model.config)
    for beam in (1, 5):
        decode(model, sentences(2), Decode(beam=beam, length_penalty=0.6))
    assert caplog.text == ""


def test_the_smallest_vocabulary_fills_a_beam():
    """More beams than words to begin a sentence with."""
    assert VOCABULARY < 64
    model = random_model(9, 9)
    ((*found,),) = decode(model, [[5, EOS]], Decode(beam=5), nbest=5)
    assert all(hypothesis.score > -100 for hypothesis in found)
