"""``labo generate``: a line for a line, each depending on itself alone."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from labo.lab.errors import RequestError
from labo.lab.language_modeling.generate import Generator, Sampling, draw_tokens, generate_stream
from tiny_corpus import labo
from tiny_language import learned_tokenizer, save_causal

PROMPTS = ["the dog", "", "3: the über-bär sees the cat", "the", "owl\tfox  </s> <s>"]
POSITIONS = 48


@pytest.fixture(scope="module", params=["gpt2-tiny", "llama-tiny"])
def folder(request, tmp_path_factory):
    return save_causal(tmp_path_factory.mktemp("model"), POSITIONS, preset=request.param)


def stream(folder, text: bytes, **options) -> bytes:
    target = io.BytesIO()
    generate_stream(folder, io.BytesIO(text), target, **options)
    return target.getvalue()


def test_greedy_is_the_most_probable_token_each_time(folder):
    plain, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    found = Generator(folder, max_tokens=12).generate(PROMPTS)
    for prompt, continuation in zip(PROMPTS, found, strict=True):
        ids = tokenizer(prompt).input_ids
        tokens, probabilities = [], []
        while len(tokens) < 12 and (not tokens or tokens[-1] != 2):
            with torch.no_grad():
                p = plain(torch.tensor([ids + tokens])).logits[0, -1].softmax(-1)
            tokens.append(int(p.argmax()))
            probabilities.append(float(p.max()))
        assert list(continuation.tokens) == tokenizer.convert_ids_to_tokens(tokens)
        assert continuation.probabilities == pytest.approx(probabilities, rel=1e-3)
        said = [token for token in tokens if token != 2]
        assert continuation.text == tokenizer.decode(said, skip_special_tokens=True)


def test_what_a_line_gives_depends_neither_on_the_others_nor_on_the_batch(folder):
    options = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 10}
    together = Generator(folder, **options).generate(PROMPTS)
    narrow = Generator(folder, batch_tokens=1, **options).generate(PROMPTS)
    assert [c.tokens for c in together] == [c.tokens for c in narrow]
    generator = Generator(folder, **options)
    for number, prompt in enumerate(PROMPTS, 1):
        (alone,) = generator.generate([prompt], first_line=number)
        assert alone.tokens == together[number - 1].tokens
    other = Generator(folder, seed=1, **options).generate(PROMPTS)
    assert [c.tokens for c in other] != [c.tokens for c in together]


def test_tokens_are_drawn_with_their_probabilities():
    p = torch.tensor([0.45, 0.05, 0.3, 0.2])
    u = ((torch.arange(10_000) + 0.5) / 10_000).unsqueeze(-1)
    log_p = p.log().expand(len(u), -1)

    def shares(**options) -> list[float]:
        drawn = draw_tokens(log_p, u, Sampling(**options))
        return (drawn.bincount(minlength=4) / len(u)).tolist()

    assert shares(temperature=1.0) == pytest.approx(p.tolist(), abs=1e-3)
    cold = (p**2 / (p**2).sum()).tolist()
    assert shares(temperature=0.5) == pytest.approx(cold, abs=1e-3)
    assert shares(temperature=1.0, top_p=0.7) == pytest.approx([0.6, 0, 0.4, 0], abs=1e-3)
    assert shares(temperature=1.0, top_p=0.01) == [1, 0, 0, 0]
    # A number next to one draws a token that was kept.
    sampling, last = Sampling(temperature=1.0, top_p=0.85), torch.tensor([[1 - 2**-24]])
    assert int(draw_tokens(torch.tensor([[0.6, 0.3, 0.1]]).log(), last, sampling)) == 1


def test_one_line_for_each_line(folder):
    given = "\n".join(PROMPTS).encode() + b"\n\xff\r\n"
    output = stream(folder, given, max_tokens=8)
    assert output.count(b"\n") == len(PROMPTS) + 1
    records = [json.loads(line) for line in stream(folder, given, scores=True).splitlines()]
    assert [record["line"] for record in records] == list(range(1, len(PROMPTS) + 2))
    assert [record["prompt"] for record in records[:-1]] == PROMPTS
    assert all(len(r["tokens"]) == len(r["probabilities"]) for r in records)


def test_long_prompts_lose_their_beginning(folder):
    notices = []
    generator = Generator(folder, max_tokens=8, notice=notices.append)
    (found,) = generator.generate(["the dog sees the cat. " * 30], first_line=7)
    assert len(found.tokens) <= 8
    (notice,) = notices
    assert re.match(f"line 7 has .* there is room for {POSITIONS - 9}", notice)


def test_a_chat_model_answers_a_message(tmp_path):
    folder = save_causal(tmp_path / "chat", POSITIONS, kind="chat")
    generator = Generator(folder, max_tokens=4)
    tokenizer = learned_tokenizer(chat=True)
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the dog"}], add_generation_prompt=True
    )["input_ids"]
    assert generator._encode("the dog", 1) == expected
    assert len(generator.generate(["the dog"])) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.0}, "--top-p: should be greater than 0"),
        ({"temperature": -1.0}, "temperature: should be greater than or equal to 0"),
        ({"max_tokens": POSITIONS}, f"{POSITIONS} is too many for a model of {POSITIONS}"),
        ({"beam": 3}, "unknown key 'beam'"),
    ],
)
def test_wrong_options(folder, options, message):
    with pytest.raises(RequestError, match=message):
        Generator(folder, **options)


def test_the_command(folder, tmp_path, monkeypatch, capsysbinary):
    class Stdin:
        buffer = io.BytesIO(b"the dog\nthe cat\n")

    monkeypatch.setattr(sys, "stdin", Stdin)
    options = ("--max-tokens", 5, "--temperature", 0.8, "--seed", 3)
    assert labo("generate", folder, *options) == 0
    assert capsysbinary.readouterr().out.count(b"\n") == 2
    assert labo("generate", tmp_path) == 2
    assert b"is no run with best/config.json" in capsysbinary.readouterr().err
