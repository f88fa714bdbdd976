"""labo teacher --from: the answers of a server, checked position by position; what is stored."""

from __future__ import annotations

import copy
import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from labo.cli import app
from labo.lab.errors import DataError, RequestError
from labo.lab.language_modeling.prepared import PreparedDocuments
from labo.lab.text.arrow import IGNORED
from labo.lab.text.stored import StoredTeacher
from labo.lab.text.teacher import ClassSelection, store
from tiny_corpus import refused
from tiny_language import few_documents, learned_tokenizer, save_causal

K = 5
FORMATS = ["vllm", "batch", "sglang", "openai", "openai-text", "generated"]


@pytest.fixture(scope="module", params=["text", "prompt"])
def data(request, tmp_path_factory):
    return few_documents(tmp_path_factory.mktemp(request.param) / "data", request.param)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return few_documents(tmp_path_factory.mktemp("texts") / "data", "text")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face folder whose model has room for every document."""
    return save_causal(tmp_path_factory.mktemp("model"), 400)


def predictions(model, data):
    """Of each training document tokens, labels, log-probabilities (n, V) before each of them."""
    causal = AutoModelForCausalLM.from_pretrained(model).eval()
    split = PreparedDocuments(data).split("train")
    for document in range(len(split)):
        tokens = split.tokens(document).tolist()
        with torch.inference_mode():
            log_p = causal(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        yield tokens, split.labels(document).tolist(), log_p


def answer(form, tokens, labels, log_p):
    """A document as a server answers; log_p[i] predicts token i + 1."""
    tokenizer, top = learned_tokenizer(), [None]
    for at, token in enumerate(tokens[1:]):
        best = log_p[at].topk(K)
        entry = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        top.append(entry | {token: log_p[at, token].item()})

    def listed(make):
        return [None if entry is None else make(entry) for entry in top]

    if form == "vllm":
        return {"prompt_logprobs": listed(lambda entry: {str(t): v for t, v in entry.items()})}
    if form == "batch":
        rich = listed(lambda entry: {str(t): {"logprob": v, "rank": 1} for t, v in entry.items()})
        body = {"choices": [{"text": "", "prompt_logprobs": rich}]}
        return {"custom_id": "1", "response": {"body": body}}
    if form == "sglang":
        own = [[None, tokens[0], None]]
        own += [
            [top[at][token], token, tokenizer.decode([token])]
            for at, token in enumerate(tokens)
            if at
        ]
        others = listed(lambda entry: [[v, t, None] for t, v in entry.items()])
        return {"meta_info": {"input_token_logprobs": own, "input_top_logprobs": others}}
    by_id = "token_id:{}".format
    if form == "generated":  # the learned tokens alone
        content = [
            {
                "token": by_id(tokens[at]),
                "logprob": top[at][tokens[at]],
                "top_logprobs": [{"token": by_id(t), "logprob": v} for t, v in top[at].items()],
            }
            for at in range(1, len(tokens))
            if labels[at] != IGNORED
        ]
        return {"choices": [{"logprobs": {"content": content}}]}
    names = list(map(by_id, tokens))
    if form == "openai-text":  # parts of characters have no text of their own
        texts = [tokenizer.decode([token]) for token in tokens]
        names = [b if "\ufffd" in a else a for a, b in zip(texts, names, strict=True)]
    named = listed(lambda entry: {by_id(t): v for t, v in entry.items()})
    return {"choices": [{"logprobs": {"tokens": names, "top_logprobs": named}}]}


def write(path, answers):
    path.write_text("".join(json.dumps(line) + "\n" for line in answers))
    return path


@pytest.fixture(scope="module")
def by_model(model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("by-model") / "out"
    store(model, data, out, top_k=K, precision="float32")
    return StoredTeacher(out)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_shards_of_the_model_itself(form, model, data, by_model, tmp_path):
    file = write(tmp_path / "a.jsonl", (answer(form, *x) for x in predictions(model, data)))
    store(None, data, tmp_path / "out", served=file, top_k=K, precision="float32", part_targets=40)
    stored = StoredTeacher(tmp_path / "out")
    assert len(stored) == len(by_model) > 3
    for sample in range(len(stored)):
        for a, b in zip(stored.sample(sample), by_model.sample(sample), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def shifted(positions, _):
    positions[:] = [None, *positions[2:], positions[-1]]


def first_value(value):
    def change(positions, _):
        token = next(iter(positions[2]))
        positions[2][token] = value

    return change


BAD = {
    "line 3, position 1: the token .* of the document is .*; the file fits if it is moved": shifted,
    "line 3: .* positions for a document of .* tokens": lambda p, _: p.__delitem__(slice(2)),
    "line 3, position 2: token .* has the log-probability nan": first_value(math.nan),
    "line 3, position 2: 2 candidates, fewer than --top-k 5": lambda p, _: [
        p[2].pop(key) for key in list(p[2])[:-2]
    ],
    "line 3, position 2: token 99999 is not in the tokenizer": lambda p, _: p[2].update(
        {"99999": -1.0}
    ),
    "line 3, position 2: the probabilities sum to more than 1": lambda p, _: p[2].update(
        dict.fromkeys(p[2], -0.1)
    ),
    "line 3: no log-probabilities": lambda p, a: a.__setitem__(2, {"text": "x"}),
    "ends after line 4": lambda p, a: a.__delitem__(slice(4, None)),
    "the data have only": lambda p, a: a.append(a[0]),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_refused_with_its_place_and_nothing_is_written(
    message, model, texts, tmp_path
):
    answers = [answer("vllm", *x) for x in predictions(model, texts)]
    BAD[message](answers[2]["prompt_logprobs"], answers)
    file = write(tmp_path / "a.jsonl", answers)
    folder = tmp_path / "stored"
    folder.mkdir()
    with refused(message):
        store(None, texts, folder / "out", served=file, top_k=K, part_targets=10)
    assert [path.name for path in folder.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (
            "openai",
            lambda x: x["choices"][0]["logprobs"]["top_logprobs"][2].update({"\ufffd": -9.0}),
            r"line 2, position 2: \d+ tokens .* let the server name",
        ),
        (
            "sglang",
            lambda x: x["meta_info"]["input_token_logprobs"][2].__setitem__(2, "elsewhere"),
            "line 2, position 2: token .* is 'elsewhere' for the",
        ),
    ],
)
def test_texts_that_name_several_tokens_or_another_one_are_refused(
    form, change, message, model, texts, tmp_path
):
    lines = [answer(form, *x) for x in predictions(model, texts)]
    change(lines[1])
    file = write(tmp_path / "a.jsonl", lines)
    with pytest.raises(DataError, match=message):
        store(None, texts, tmp_path / "out", served=file, top_k=K)


def test_a_model_with_another_tokenizer_is_refused_with_both_sizes(texts, model, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(model, other)
    tokenizer = copy.deepcopy(learned_tokenizer())
    tokenizer.add_tokens(["quite-new"])
    tokenizer.save_pretrained(other)
    with pytest.raises(RequestError, match=f"{len(tokenizer) - 1} and {len(tokenizer)} types"):
        store(other, texts, tmp_path / "out", top_k=K)


LOG_P = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625], [0.96, 0.01, 0.01, 0.01, 0.01]]).log()


def test_a_nucleus():
    indices, log_p = ClassSelection(4, top_p=0.8)(LOG_P)
    assert indices.tolist() == [[0, 1, 2, -1], [0, -1, -1, -1]]
    torch.testing.assert_close(log_p[0, :3], LOG_P[0, :3])
    assert (log_p[indices < 0] == -math.inf).all()


def test_draws_are_unbiased_and_repeatable():
    rows, k = LOG_P[:1].expand(20_000, -1), 3
    pick = ClassSelection(k, sampling="random")
    indices, log_p = pick(rows, torch.Generator().manual_seed(1))
    again, _ = pick(rows, torch.Generator().manual_seed(1))
    assert torch.equal(indices, again)
    p = log_p.exp()
    torch.testing.assert_close(p.sum(-1), torch.ones(20_000))
    sums = torch.zeros(5).index_add_(0, indices.clamp(min=0).flatten(), p.flatten())
    torch.testing.assert_close(sums / 20_000, LOG_P[0].exp(), atol=0.01, rtol=0)
    top, values = ClassSelection(k)(rows[:1])  # leans to its own tokens
    assert abs(values.exp()[0, 0] / values.exp().sum() - 0.5) > 0.05
    assert top.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_p": 0.0}, "--top-p: should be greater than 0"),
        ({"sampling": "best"}, "--sampling: should be 'top' or 'random'"),
        ({"sampling": "random", "top_p": 0.5}, "--top-p goes with --sampling top"),
    ],
)
def test_wrong_selections_are_refused(given, message, tmp_path):
    with pytest.raises(RequestError, match=message):
        store(None, tmp_path, tmp_path / "out", **given)


def test_the_command(model, texts, tmp_path):
    def teacher(*arguments):
        return CliRunner().invoke(app, ["teacher", *map(str, arguments)])

    for name, options in {"p": ["--top-p", "0.01"], "r": ["--sampling", "random"]}.items():
        done = teacher(model, texts, "--top-k", 4, "-o", tmp_path / name, *options)
        assert done.exit_code == 0, done.output
        stored = StoredTeacher(tmp_path / name)
        samples = [stored.sample(number) for number in range(len(stored))]
        indices, log_p = (np.concatenate(column) for column in zip(*samples, strict=True))
        assert (indices < 0).any()
        assert np.isfinite(log_p[indices >= 0]).all()
    file = write(tmp_path / "a.jsonl", (answer("vllm", *x) for x in predictions(model, texts)))
    served = [texts, "--from", file, "-o", tmp_path / "s"]
    done = teacher(*served, "--top-k", 4)
    assert done.exit_code == 0, done.output
    done = teacher(*served, "--force", "--sampling", "random")
    assert "needs whole predictions" in str(done.exception or done.output)
