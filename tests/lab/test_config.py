"""Recipes: what is right is filled in, what is wrong is said in a line."""

from __future__ import annotations

import pytest
import yaml

from labo.lab.config import (
    RECIPES,
    RecipeError,
    differing_keys,
    dump_yaml,
    known_recipes,
    parse_yaml,
)
from labo.lab.methods import METHODS, methods_for
from labo.lab.recipes import build_recipe, load_recipe


def problems(*overrides: str, recipe: str = "digits") -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    return caught.value.problems


def test_overrides_are_yaml_values():
    recipe = load_recipe(
        "digits",
        [
            "optim.weight_decay=1e-3",
            "train.patience=null",
            "data.flip=true",
            "optim.name=adam",
            "optim.betas=[0.8, 0.9]",
        ],
    )
    assert recipe.optim.weight_decay == 1e-3
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.train.patience is None
    assert recipe.data.flip is True
    assert load_recipe("digits", ["data.flip=alternate"]).data.flip == "alternate"
    assert problems("data.flip=half") == ["data.flip: true, false or alternate, not 'half'"]


@pytest.mark.parametrize(
    ("recipe", "overrides", "found"),
    [
        ("digits", "optim.name=sgd optim.betas=[0.8,0.9]", "optim.betas / optim.name=sgd"),
        ("digits", "optim.name=adam optim.nesterov=true", "optim.nesterov / optim.name=adam"),
        ("digits", "optim.schedule=cosine optim.gamma=0.3", "optim.gamma / optim.schedule=cosine"),
        ("digits", "data.size=32", "data.size / data.name=digits"),
        (
            "digits",
            "data.name=folder data.root=x data.padding=4",
            "data.padding / data.name=folder",
        ),
        (
            "digits",
            "data.mix_probability=0.5",
            "data.mix_probability / data.mixup=0 and data.cutmix=0",
        ),
        ("iwslt14", "data.path=x data.size=500", "data.size / data.name=prepared"),
        ("lm-sft", "data.path=x data.vocabulary=9000", "data.vocabulary / data.name=prepared"),
    ],
)
def test_overrides_without_an_effect_are_refused(recipe, overrides, found):
    key, reason = found.split(" / ")
    assert problems(*overrides.split(), recipe=recipe) == [f"{key} has no effect with {reason}"]


def test_a_recipe_may_have_keys_without_an_effect():
    assert load_recipe("digits", ["optim.name=adamw"]).optim.momentum == 0.9
    assert load_recipe("digits", ["data.size=224", "optim.warmup_from=0"]).data.size == 224


@pytest.mark.parametrize("order", [1, -1])
def test_a_method_and_its_hyper_parameter_in_any_order(order):
    recipe = load_recipe("digits", ["method=ls", "method.alpha=0.3"][::order])
    assert recipe.method == {"name": "ls", "alpha": 0.3, "convention": "torch"}


def test_choosing_a_method_takes_its_own_defaults():
    assert load_recipe("digits", ["method.tau=3"]).method["tau"] == 3
    assert load_recipe("digits", ["method.tau=3", "method=labo"]).method["tau"] == 3
    assert load_recipe("digits", ["method=cs-kd"]).method["tau"] == 4


@pytest.mark.parametrize("name", ["cskd", "CS_KD"])
def test_method_names_however_written(name):
    assert load_recipe("digits", [f"method={name}"]).method["name"] == "cs-kd"


def test_a_key_without_a_near_one_in_its_section_is_told_the_section():
    (line,) = problems("data.epochs=1")
    assert line.startswith("unknown key 'data.epochs' (keys of data: name, ")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optim.lrr=1", "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("method.tua=1", "unknown key 'method.tua'; did you mean 'method.tau'?"),
        ("optim.lr=fast", "optim.lr: should be a valid number, got 'fast'"),
        ("optim.lr=.nan", "optim.lr: should be a finite number, got nan"),
        ("optim.lr=-1", "optim.lr: should be greater than 0, got -1"),
        ("train.batch_size=0", "train.batch_size: should be greater than or equal to 1, got 0"),
        ("optim.name=sdg", "optim.name: should be 'sgd', 'adam' or 'adamw', got 'sdg'"),
        (
            "optim.betas=[x,1]",
            "optim.betas: should be a valid number, got 'x'",
        ),
        ("optim=3", "optim: should be a valid dictionary or instance of Optim, got 3"),
        (
            "task=[1]",
            "unknown task [1] (known: image_classification, translation, language_modeling)",
        ),
        ("method.tau=0", "method.tau: tau must be a finite number above 0, got 0.0"),
        (
            "optim.schedule=step",
            "optim: schedule 'step' needs milestones, and no other schedule has any",
        ),
        ("train.average_last=2 train.ema=0.9", "train: average_last and ema exclude each other"),
        ("method=kd", "method.teacher: missing"),
        (
            "method=fl data.mixup=0.2",
            "method fl does not support data.mixup and data.cutmix",
        ),
        ("train.epochs.x=1", "train.epochs is not a section of the recipe"),
        ("lr", "'lr' is not an override; write KEY=VALUE, such as optim.lr=0.1"),
    ],
)
def test_one_line_for_a_wrong_key(override, line):
    assert problems(*override.split()) == [line]


def test_all_wrong_keys_at_once():
    assert len(problems("optim.lr=-1", "sede=1", "method.tua=1", "train.epochs=0")) == 4


def test_unknown_names_get_the_nearest():
    assert "did you mean 'digits'?" in problems(recipe="digit")[0]
    assert "did you mean 'cs-kd'?" in problems("method=cs-kdd")[0]
    assert "did you mean 'resnet18'?" in problems("model.name=resnet-18")[0]
    assert "did you mean 'image_classification'?" in problems("task=image_clasification")[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: 1\nseed: 2\n", "line 2: key 'seed' is given twice"),
        ("optim: {lr: 1\n", "line 2"),
        ("- 1\n", "a recipe is a mapping of sections"),
        ("!!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    ],
)
def test_files_that_are_no_recipes(text, problem, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert problem in problems(recipe=str(path))[0]


@pytest.mark.parametrize("method", METHODS)
def test_the_resolved_copy_is_a_recipe_again(method):
    teacher = ["method.teacher=runs/x"] if method in ("kd", "dkd", "tf-kd-self") else []
    stored = ["method.stored=runs/x"] if method == "topk-kd" else []
    recipes = {"digits": "image_classification", "cldr": "translation"}
    recipes["lm-manual"] = "language_modeling"
    name = next(name for name, task in recipes.items() if method in methods_for(task))
    recipe = load_recipe(name, [f"method={method}", *teacher, *stored])
    copy = yaml.safe_load(yaml.safe_dump(recipe.as_document()))
    assert build_recipe(copy) == recipe
    assert build_recipe(copy).digest() == recipe.digest()


def test_differing_keys():
    one = load_recipe("digits", ["seed=1", "optim.lr=0.3"]).as_document()
    assert differing_keys(one, load_recipe("digits").as_document()) == ["optim.lr", "seed"]


@pytest.mark.parametrize("name", known_recipes())
def test_recipes_are_lab_sheets(name):
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= 40
    assert any(line.startswith("#   ") and f"labo train {name}" in line for line in lines)
    load_recipe(name)


def test_the_recipes_own_method_keeps_its_settings():
    """cldr has a short warm-up for LABO; naming the method again does not lose it."""
    assert load_recipe("cldr", ["method=LABO"]) == load_recipe("cldr")
    assert load_recipe("cldr", ["method=labo", "method.tau=1.1"]).method["warmup_steps"] == 400
    assert "warmup_steps" not in load_recipe("cldr", ["method=ls"]).method


def test_what_is_written_is_read_again():
    document = {"git": "2222e39", "seed": "1e-4", "lr": 1e-4, "names": ["2e5", "no", "~"], "x": {}}
    assert parse_yaml(dump_yaml(document), "here") == document
