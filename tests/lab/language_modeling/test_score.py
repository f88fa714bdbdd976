"""``labo score``: the log-probability of given text, as the model itself gives it."""

from __future__ import annotations

import io
import json
import math
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from labo.lab.errors import RequestError
from labo.lab.language_modeling.documents import RawDocument
from labo.lab.language_modeling.score import Scorer, score_command
from labo.lab.text.options import ScoreOptions
from tiny_corpus import labo, refused
from tiny_language import CHAT, SENTENCES, log_probabilities, save_causal, write_rows

POSITIONS = 48
LONG = " ".join(SENTENCES[:12])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_causal(tmp_path_factory.mktemp("model"), POSITIONS, preset="llama-tiny")


def by_hand(folder, ids: list[int], learned: list[bool]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return log_probabilities(model, ids, learned, POSITIONS)


def text(value: str) -> RawDocument:
    return RawDocument.of_text("", value)


@pytest.mark.parametrize("value", ["the dog", LONG, "ü"])
def test_a_text_has_the_probability_that_the_model_gives_it(folder, value):
    (score,) = Scorer(folder).score([text(value)])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [*tokenizer(value).input_ids, tokenizer.eos_token_id]
    expected = by_hand(folder, ids, [True] * len(ids))
    assert score.log_probabilities == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert score.log_probability == pytest.approx(sum(expected), rel=1e-4)
    record = score.record(tokens=True)
    bits = -sum(expected) / math.log(2) / len(value.encode())
    assert record["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    assert record["tokens"] == len(record["token"]) == len(ids) - 1


def test_documents_do_not_depend_on_each_other(folder):
    scorer = Scorer(folder)
    together = scorer.score([text(value) for value in (LONG, *SENTENCES)])
    for value, score in zip((LONG, *SENTENCES), together, strict=True):
        (alone,) = scorer.score([text(value)])
        assert alone.tokens == score.tokens
        assert alone.log_probabilities == pytest.approx(score.log_probabilities, abs=1e-4)


def test_of_a_prompt_only_the_completion_is_scored(folder, tmp_path):
    rows = [{"prompt": "the dog ", "completion": "sees"}]
    (score,) = Scorer(folder).score_files([str(write_rows(tmp_path / "a.jsonl", rows))])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("the dog ").input_ids
    answer = tokenizer("sees", add_special_tokens=False).input_ids
    ids = [*prompt, *answer, tokenizer.eos_token_id]
    learned = [False] * len(prompt) + [True] * (len(answer) + 1)
    expected = by_hand(folder, ids, learned)
    assert score.log_probabilities == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert score.bytes == 4


def test_a_chat_is_scored_by_its_answers(tmp_path):
    folder = save_causal(tmp_path / "chat", POSITIONS, kind="chat")
    rows = [{"messages": [*CHAT, {"role": "assistant", "content": "Two."}]}]
    (score,) = Scorer(folder).score_files([str(write_rows(tmp_path / "a.jsonl", rows))])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    spelled = tokenizer.decode(tokenizer.convert_tokens_to_ids(list(score.tokens)))
    assert spelled == "Two.</s>"


def test_a_line_for_a_line(folder):
    target = io.BytesIO()
    score_command(folder, [], ScoreOptions(), io.BytesIO(b"the dog\n\nthe cat\n"), target)
    one, empty, other = map(json.loads, target.getvalue().splitlines())
    assert (one["name"], empty, other["name"]) == ("line 1", None, "line 3")
    assert one["log_probability"] < 0


def test_the_command(folder, tmp_path, capsysbinary):
    (tmp_path / "a.txt").write_text("\n".join(SENTENCES[:3]))
    assert labo("score", folder, tmp_path / "a.txt", "--documents", "line", "--tokens") == 0
    lines = capsysbinary.readouterr().out.splitlines()
    assert len(lines) == 1 + "\n".join(SENTENCES[:3]).count("\n")
    assert json.loads(lines[0])["name"] == "a.txt:1"
    assert labo("score", folder, tmp_path / "none") == 2
    assert b"none: no such file or folder" in capsysbinary.readouterr().err


def test_nothing_to_score(folder):
    with pytest.raises(RequestError, match="here: nothing to score in it"):
        Scorer(folder).score([RawDocument.of_text("here", "")])


def spoil(copy, config):
    weights = load_file(copy / "model.safetensors")
    weights[min(weights)][..., 0] = math.nan
    save_file(weights, copy / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, config: config.update(model_type="vit"), "be loaded as AutoModelForCausalLM"),
        (lambda _, config: config.update(num_labels=10**9), "num_labels is 1000000000, but the"),
        (spoil, "are not all finite"),
    ],
)
def test_a_folder_without_a_sound_model_is_refused(change, message, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    change(copy, config)
    (copy / "config.json").write_text(json.dumps(config))
    with refused(message, RequestError):
        Scorer(copy)


def with_tokenizer(folder, tmp_path, **parts):
    copy = shutil.copytree(folder, tmp_path / "copy")
    path = copy / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return copy


def test_a_tokenizer_that_multiplies_text_is_refused(folder, tmp_path):
    ten = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    normalizer = {"type": "Sequence", "normalizers": [ten] * 9}
    with pytest.raises(RequestError, match="its normalizer makes a text 1000000000 times as long"):
        Scorer(with_tokenizer(folder, tmp_path, normalizer=normalizer))


def test_an_expression_that_never_ends_is_one_line(folder, tmp_path, capsys):
    slow = {"type": "Split", "pattern": {"Regex": "(a|a|b?)+$"}, "behavior": "Isolated"}
    copy = with_tokenizer(folder, tmp_path, pre_tokenizer=slow | {"invert": False})
    (tmp_path / "text").write_text("a" * 60 + "c")
    assert labo("score", copy, tmp_path / "text") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("labo: PanicException: Onig")
