"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedTokenizerFast

from labo.lab.errors import RequestError
from labo.lab.text.pretrained_tokenizer import pretrained_tokenizer
from tiny_corpus import refused
from tiny_language import learned_tokenizer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nothing there", "no such folder"),
        ("empty", "holds no tokenizer that can be loaded"),
        ("no end", r"no token that ends a text \(eos_token\)"),
        ("remote code", "holds no tokenizer that can be loaded|no tokenizer"),
    ],
)
def test_folders_without_a_usable_tokenizer_are_refused(tmp_path, change, message):
    folder = tmp_path / "tokenizer"
    if change != "nothing there":
        folder.mkdir()
    if change == "no end":
        PreTrainedTokenizerFast(
            tokenizer_object=learned_tokenizer().backend_tokenizer
        ).save_pretrained(folder)
    if change == "remote code":
        trace = tmp_path / "was here"
        (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
        settings = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with refused(message, RequestError):
        pretrained_tokenizer(folder)
    assert not (tmp_path / "was here").exists()
