"""Starting from a folder: all weights, some of them, or adapters; saved as a plain folder again."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab_runs import log_of, losses, outcome, run
from labo.lab.errors import RequestError
from labo.lab.language_modeling.generate import Generator
from labo.lab.language_modeling.model import causal_config, fresh_model
from labo.lab.language_modeling.task import LanguageModelingTask
from labo.lab.recipes import load_recipe
from labo.lab.text.pretrained_tokenizer import pretrained_tokenizer
from tiny_corpus import refused
from tiny_folders import assert_adapters_agree
from tiny_language import learned_tokenizer, prepare_prompts, prepare_texts

SETTINGS = ["data.block=64", "train.batch_tokens=128", "train.accumulate=1", "train.precision=no"]
SETTINGS += ["train.epochs=2", "train.log_every=1", "optim.lr=5e-3", "method=ls"]


@pytest.fixture(scope="module", params=["gpt2-tiny", "llama-tiny"])
def pretrained(request, tmp_path_factory) -> Path:
    """A folder as one finds it: a model with more rows than types, and its tokenizer."""
    folder = tmp_path_factory.mktemp("pretrained") / request.param
    torch.manual_seed(0)
    dimensions = {"width": 16, "layers": 2, "heads": 2, "ffn": 20}
    config = causal_config(request.param, 304, positions=96, begin=0, end=2, dimensions=dimensions)
    fresh_model(config).causal.save_pretrained(folder)
    learned_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(pretrained) -> Path:
    tokenizer = pretrained_tokenizer(pretrained)
    return prepare_prompts(pretrained.parent / "data", tokenizer=tokenizer)


def settings(pretrained: Path, data: Path, *more: str) -> list[str]:
    return [f"model.pretrained={pretrained}", f"data.path={data}", *SETTINGS, *more]


def train(out: Path, pretrained: Path, data: Path, *more: str, kill=None, world=1) -> set[int]:
    arguments = ["train", "lm-sft", *settings(pretrained, data, *more), "--out", str(out)]
    return run(arguments, log_of(out), world, kill)


def task(pretrained: Path, data: Path, *more: str) -> LanguageModelingTask:
    return LanguageModelingTask(load_recipe("lm-sft", settings(pretrained, data, *more)))


def test_training_starts_from_the_weights_of_the_folder(pretrained, data):
    model = task(pretrained, data, "model.lora=null").build_model()
    weights = load_file(pretrained / "model.safetensors")
    for name, tensor in model.plain_weights(model.state_dict()).items():
        assert torch.equal(tensor, weights[name]), name
    assert task(pretrained, data).num_classes == 304  # rows of the output layer


@pytest.mark.parametrize("lora", ["model.lora=null", "model.lora={rank: 4, dropout: 0.1}"])
def test_the_fine_tuned_model_is_a_plain_folder(pretrained, data, lora, tmp_path):
    out = tmp_path / "run"
    more = (lora, *([] if "null" in lora else ["optim.lr=0.05"]))
    assert train(out, pretrained, data, *more) == {0}, log_of(out).read_text()
    assert losses(out)[-1] < losses(out)[0]
    before, after = (load_file(f / "model.safetensors") for f in (pretrained, out / "best"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if "null" in lora:
        assert changed == before.keys()
    else:
        assert changed
        assert not any("norm" in name or "ln_" in name or "embed" in name for name in changed)
    plain = AutoModelForCausalLM.from_pretrained(out / "best")
    tokenizer = AutoTokenizer.from_pretrained(out / "best")
    assert plain(torch.tensor([tokenizer("say").input_ids])).logits.shape[-1] == 304
    assert len(Generator(out, max_tokens=4).generate(["say 3: "])) == 1


def test_adapters_are_merged_or_apart(pretrained, data, tmp_path):
    """Both have the logits of the trained model: merged weights, and what PEFT loads."""
    first = "c_attn" if "gpt2" in pretrained.name else "q_proj"
    lora = f"{{rank: 3, alpha: 5, save: both, targets: [{first}]}}"
    small = task(pretrained, data, f"model.lora={lora}")
    model = small.build_model().eval()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 4
    assert all(f"{first}.lora_" in name for name in trained)
    ids = torch.arange(9)[None]
    assert_adapters_agree(small, model, pretrained, tmp_path, 1e-4, input_ids=ids)


def test_frozen_weights_stay(pretrained, data, tmp_path):
    out = tmp_path / "run"
    body = "transformer" if "gpt2" in pretrained.name else "model"
    layers = "h" if "gpt2" in pretrained.name else "layers"
    norms = "*ln_*" if "gpt2" in pretrained.name else "*norm*"
    freeze = f"model.freeze=[{body}.{layers}.0, '{norms}']"
    assert train(out, pretrained, data, "model.lora=null", freeze) == {0}, log_of(out).read_text()
    before, after = (load_file(f / "model.safetensors") for f in (pretrained, out / "best"))
    for name, tensor in before.items():
        frozen = f"{layers}.0." in name or "norm" in name or "ln_" in name
        assert torch.equal(tensor, after[name]) == frozen, name


def test_a_killed_run_ends_as_if_nothing_had_happened(pretrained, data, tmp_path):
    world = 1 if "gpt2" in pretrained.name else 2
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ("model.lora={rank: 4, dropout: 0.1}", "train.save_every=2")
    assert train(whole, pretrained, data, *more, world=world) == {0}, log_of(whole).read_text()
    codes = train(killed, pretrained, data, *more, kill=("step", 5), world=world)
    assert -signal.SIGKILL in codes
    assert train(killed, pretrained, data, *more, world=world) == {0}, log_of(killed).read_text()
    assert outcome(killed) == outcome(whole)


def test_the_signature_names_the_weights(pretrained, data, tmp_path):
    one = task(pretrained, data).fingerprint
    other = shutil.copytree(pretrained, tmp_path / "other")
    assert task(other, data).fingerprint == one
    model = AutoModelForCausalLM.from_pretrained(other)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(other)
    assert task(other, data).fingerprint != one


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.preset=gpt2-tiny"], "give preset or pretrained, and not both"),
        (["model.width=8"], "the dimensions and dropout of a pretrained model are its own"),
        (["model.pretrained=nowhere"], "nowhere: no such folder"),
        (["data.block=128"], "data.block: 128 is more than the 96 positions of"),
        (["model.freeze=['*']", "model.lora=null"], "no parameter is left to train"),
        (
            ["model.lora={targets: [nothing]}"],
            r"model\.lora\.targets: no layer nothing \(there are .*proj",
        ),
    ],
)
def test_wrong_requests(pretrained, data, more, message):
    with refused(message, RequestError):
        task(pretrained, data, "train.batch_tokens=256", *more).build_model()


def test_data_of_another_tokenizer_is_refused(pretrained, tmp_path):
    prepare_texts(tmp_path / "data", vocabulary=270)
    with pytest.raises(RequestError, match="was not prepared with the tokenizer of"):
        task(pretrained, tmp_path / "data")


def test_code_of_a_folder_is_not_run(pretrained, data, tmp_path):
    folder, trace = shutil.copytree(pretrained, tmp_path / "model"), tmp_path / "was here"
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "evil.Evil"}}
    config["auto_map"]["AutoConfig"] = "evil.EvilConfig"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError) as caught:
        task(folder, data).build_model()
    assert "\n" not in str(caught.value)
    assert not trace.exists()
