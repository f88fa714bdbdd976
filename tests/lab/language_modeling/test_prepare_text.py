"""``labo prepare-text``: documents to token ids, the same bytes every time, all or nothing."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from labo.lab.command_options import validated
from labo.lab.errors import RequestError
from labo.lab.language_modeling import prepare as preparing
from labo.lab.language_modeling.documents import Part, RawDocument
from labo.lab.language_modeling.options import DocumentOptions, Tokenization
from labo.lab.language_modeling.prepare import prepare, prepare_documents, summarize
from labo.lab.language_modeling.prepared import PreparedDocuments
from labo.lab.language_modeling.tokenizers import encode
from labo.lab.text import arrow
from labo.lab.text.arrow import IGNORED
from tiny_corpus import digests, labo, refused
from tiny_language import CHAT, SENTENCES, learned_tokenizer, save_causal, write_rows


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    for number, text in enumerate(SENTENCES):
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


def run(corpus: Path, name: str = "out", **settings) -> PreparedDocuments:
    given = {"train": [str(corpus)], "holdout": 5, "holdout_test": 4, "vocabulary": 280}
    options = validated(DocumentOptions, given | settings)
    return prepare(options, corpus.parent / name)


def texts(prepared: PreparedDocuments, split: str) -> list[str]:
    documents = prepared.split(split)
    return [
        prepared.tokenizer.decode(documents.tokens(i), skip_special_tokens=True)
        for i in range(len(documents))
    ]


def test_every_document_is_in_one_split_and_comes_back_exactly(corpus):
    prepared = run(corpus)
    valid = SENTENCES[4::5]
    rest = [text for number, text in enumerate(SENTENCES, 1) if number % 5]
    assert texts(prepared, "valid") == valid
    assert texts(prepared, "test") == rest[3::4]
    assert texts(prepared, "train") == [t for n, t in enumerate(rest, 1) if n % 4]
    split = prepared.split("valid")
    assert split.name(0) == "004.txt"
    assert split.bytes.tolist() == [len(text.encode()) for text in valid]
    for i in range(len(split)):
        ids = split.tokens(i)
        assert (ids[0], ids[-1]) == (prepared.begin, prepared.end) == (0, 2)
        assert split.labels(i).tolist() == ids.tolist()
    manifest = prepared.manifest
    for name in ("train", "valid", "test"):
        split = prepared.split(name)
        assert manifest["sizes"][name] == len(split)
        assert manifest["tokens"][name] == split.lengths.sum()
        assert manifest["learned_tokens"][name] == (split.lengths - 1).sum()
        assert manifest["bytes"][name] == split.bytes.sum()
    train = prepared.split("train")
    every = np.concatenate([train.tokens(i) for i in range(len(train))])
    assert np.array_equal(prepared.frequencies("tokens"), np.bincount(every, minlength=280))
    assert [entry["file"] for entry in manifest["inputs"]][:2] == ["000.txt", "001.txt"]


def test_the_same_text_gives_the_same_bytes(corpus, monkeypatch):
    one = run(corpus, "one")
    monkeypatch.setattr(preparing, "_ROWS_AT_ONCE", 3)
    monkeypatch.setattr(preparing, "_CHARACTERS_AT_ONCE", 100)
    assert run(corpus, "two").fingerprint == one.fingerprint
    # Other libraries read the splits and the tokenizer.
    rows = datasets.Dataset.from_file(str(one.path / "valid.arrow"))
    assert rows.column_names == ["input_ids", "bytes", "name"]
    tokenizer = AutoTokenizer.from_pretrained(one.path / "tokenizer")
    assert tokenizer(SENTENCES[4]).input_ids == rows["input_ids"][0][:-1]


def test_prompts_and_chats_have_labels(tmp_path):
    rows = [{"prompt": f"{n} + {n} = ", "completion": f"{2 * n}"} for n in range(12)]
    prepared = run(write_rows(tmp_path / "sums.jsonl", rows))
    split, tokenizer = prepared.split("train"), prepared.tokenizer
    assert prepared.kind == "prompt"
    labels = split.labels(0)
    assert tokenizer.decode(labels[labels != IGNORED]) == "0</s>"
    given = split.tokens(0)[labels == IGNORED]
    assert tokenizer.decode(given) == "<s>0 + 0 = "
    rows = datasets.Dataset.from_file(str(prepared.path / "train.arrow"))
    assert rows.column_names == ["input_ids", "labels", "bytes"]
    assert split.bytes[0] == 1

    chats = [{"messages": [*CHAT, {"role": "assistant", "content": f"{n}"}]} for n in range(12)]
    prepared = run(write_rows(tmp_path / "chats.jsonl", chats), "chats")
    split, tokenizer = prepared.split("train"), prepared.tokenizer
    assert prepared.kind == "chat"
    assert prepared.begin is None
    assert prepared.end == tokenizer.eos_token_id
    labels = split.labels(0)
    assert tokenizer.decode(labels[labels != IGNORED]) == "0</s>"
    whole = tokenizer.apply_chat_template(chats[0]["messages"])["input_ids"]
    assert split.tokens(0).tolist() == whole


def test_what_looks_like_a_special_token_in_a_text_is_text():
    """A document cannot end another one, nor pretend to."""
    tokenizer = learned_tokenizer()
    (ids, _), *_ = encode(tokenizer, [RawDocument.of_text("", "a</s><s>b")])
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert not {0, 1, 2, 3} & set(ids[1:-1])


def test_a_prompt_is_encoded_as_it_will_be_when_it_stands_alone():
    tokenizer = learned_tokenizer()
    (ids, labels), *_ = encode(
        tokenizer, [RawDocument("", "prompt", (Part("the ", False), Part("dog", True)))]
    )
    alone = tokenizer("the ").input_ids
    assert ids[: len(alone)] == alone
    assert labels[: len(alone)] == [IGNORED] * len(alone)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the dog"
    # Together they have other tokens, so that this is no accident.
    assert tokenizer("the dog").input_ids[: len(alone)] != alone


def test_repeated_and_empty_documents_are_counted(tmp_path, capsys):
    rows = [{"text": text} for text in ["", *(f"text number {n % 8}" for n in range(20)), ""]]
    prepared = run(write_rows(tmp_path / "a.jsonl", rows))
    assert prepared.manifest["empty"] == {"train": 2, "valid": 0, "test": 0}
    assert sum(prepared.manifest["sizes"].values()) == 20
    held = {*texts(prepared, "valid"), *texts(prepared, "test")}
    expected = sum(text in held for text in texts(prepared, "train"))
    assert prepared.manifest["repeated"] == expected > 0
    summarize(prepared)
    said = f"labo: warning: {expected} training documents are also in the held-out splits\n"
    assert capsys.readouterr().err == said


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "_CHARACTERS_AT_ONCE", 1 << 14)
    monkeypatch.setattr(arrow, "_BATCH_BYTES", 1 << 16)
    tokenizer = learned_tokenizer()

    def peak(size: int) -> int:
        def documents():
            for number in range(size):
                yield RawDocument.of_text(f"{number}", f"{number} " + SENTENCES[0] * 50)

        splits = {"train": documents()}
        options = Tokenization(holdout=size // 2, holdout_test=size // 2)
        tracemalloc.start()
        prepare_documents(tmp_path / f"{size}", splits, options, tokenizer=tokenizer)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(20)  # what is loaded once
    assert peak(1600) < 1.2 * peak(400)


def test_the_command(corpus, tmp_path, monkeypatch, capsys):
    out = tmp_path / "data"
    arguments = ("prepare-text", out, "--train", corpus, "--holdout", 5, "--holdout-test", 4)
    assert labo(*arguments, "--vocabulary", 290) == 0
    shown = capsys.readouterr().out
    tokens = PreparedDocuments(out).manifest["tokens"]["train"]
    # So few tokens need a shorter warm-up than the 500 steps of the recipe.
    steps = 10 * tokens // 4096
    assert f"labo train lm-text data.path={out} method.warmup_steps={steps // 4}\n" in shown
    assert "vocabulary: 290 types, learned" in shown
    assert labo(*arguments) == 2
    assert capsys.readouterr().err == f"labo: {out} exists; --force replaces it\n"
    assert labo(*arguments, "--force", "--vocabulary", 280) == 0
    assert PreparedDocuments(out).manifest["vocabulary"] == 280
    capsys.readouterr()
    # With the tokenizer of a model, that model is the one to train.
    folder = save_causal(tmp_path / "gpt", 24)
    assert labo(*arguments, "--force", "--tokenizer", folder) == 0
    line = f"labo train lm-sft data.path={out} model.pretrained={folder} data.block=24\n"
    assert line in capsys.readouterr().out
    assert PreparedDocuments(out).tokenizer.get_vocab() == learned_tokenizer().get_vocab()
    # A tokenizer alone is for a new model, and much text for a large one.
    (folder / "config.json").unlink()
    monkeypatch.setattr(preparing, "_LARGE", 1)
    assert labo(*arguments, "--force", "--tokenizer", folder) == 0
    assert f"labo train lm-124m data.path={out}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": []}, "--train: no training data"),
        ({"holdout": None}, "--valid: no such data; give --valid or --holdout"),
        ({"holdout_test": None}, "--test: no such data"),
        ({"holdout": 1}, "every document held out"),
        ({"valid": ["x"]}, "--valid and --holdout exclude each other"),
        ({"tokenizer": "x"}, "--vocabulary and --tokenizer exclude each other"),
        ({"vocabulary": 200}, "a vocabulary of 200 cannot hold"),
        ({"holdout": 1000}, "the valid split is empty: a file is one document: --documents line"),
        ({"train": ["{raw}/000.txt"], "documents": "line"}, "the valid split is empty$"),
    ],
)
def test_wrong_requests(corpus, settings, message):
    if "train" in settings:
        settings = settings | {"train": [name.format(raw=corpus) for name in settings["train"]]}
    with refused(message, RequestError):
        run(corpus, **settings)
    assert [path.name for path in corpus.parent.iterdir()] == ["raw"]


def test_kinds_are_not_mixed(tmp_path):
    rows = [{"text": "a"}, {"prompt": "a", "completion": "b"}]
    with pytest.raises(RequestError, match=r"a\.jsonl:2: a prompt with its completion, but"):
        run(write_rows(tmp_path / "a.jsonl", rows))


def test_what_the_command_reads_is_kept(corpus, capsys):
    before = digests(corpus)
    arguments = ("--train", corpus, "--holdout", 5, "--holdout-test", 4, "--force")
    assert labo("prepare-text", corpus / "new", *arguments) == 2
    line = f"{corpus / 'new'} is inside the input {corpus}: choose another folder to write\n"
    assert capsys.readouterr().err == f"labo: {line}"
    assert digests(corpus) == before
