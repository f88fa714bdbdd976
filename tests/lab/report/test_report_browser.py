"""The report in a real browser: headless Chromium, driven by Playwright."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labo import smoothing
from labo.lab.analysis.labels import smoothed_labels
from labo.lab.report import write_report
from report_runs import (
    BASE,
    LABO,
    LS,
    PIXEL,
    examples_of,
    is_close,
    make_hostile,
    write_run,
)

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if sync_playwright is None or chromium is None:
        missing = "the package playwright" if sync_playwright is None else "a chromium on the path"
        if os.environ.get("CI"):
            pytest.fail(f"CI must run these tests, and there is not {missing}")
        pytest.skip(f"there is not {missing}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Any]:
    """Opens a file; at the end of the test nothing may have been complained about or loaded."""
    contexts, complaints, loaded = [], [], []

    def opened(file: Path, **options: Any) -> Any:
        context = browser.new_context(**({"viewport": WIDE} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: loaded.append(request.url))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in loaded if not url.startswith(("file:", "data:"))] == []


# ------------------------------------------------------------------ the explorer


def slide(page: Any, name: str, value: float) -> None:
    page.locator(f"#explorer input[name={name}]").fill(str(value))


def part(page: Any, name: str) -> float:
    return float(page.locator(f'#explorer [data-part="{name}"]').inner_text())


def drawn(page: Any) -> dict[str, dict[str, float]]:
    """class -> column -> number."""
    rows: list[tuple[str, dict[str, str]]] = page.evaluate(
        """() => [...document.querySelectorAll('#explorer tbody tr')].map((row) => [
             row.querySelector('th').textContent,
             Object.fromEntries([...row.querySelectorAll('td')].map(
               (cell) => [cell.dataset.column, cell.textContent]))])"""
    )
    return {name: {key: float(text) for key, text in cells.items()} for name, cells in rows}


def check(page: Any, document: dict[str, Any], place: int, settings: dict[str, Any]) -> None:
    example, classes = document["examples"][place], document["classes"]
    labels = smoothed_labels(np.array(example["logits"]), example["target"], **settings)
    assert is_close(part(page, "alpha"), labels["alpha"])
    given: Any = "adaptive" if settings["alpha"] is None else settings["alpha"]
    stationary = smoothing.stationary_confidence(
        len(classes), tau=settings["tau"], alpha=given, rho=settings["rho"]
    )
    assert is_close(part(page, "confidence"), stationary)
    assert is_close(part(page, "label"), labels["labo"][example["target"]])
    shown = drawn(page)
    assert len(shown) == 10
    names = {name.replace("\u0120", "·"): i for i, name in enumerate(classes)}
    assert classes[example["target"]].replace("\u0120", "·") in shown
    for name, cells in shown.items():
        for column, number in cells.items():
            label = labels[{"p": "prediction", "onehot": "one_hot"}.get(column, column)]
            assert is_close(number, label[names[name]]), (name, column)


def test_sliders_draw_what_smoothing_computes(show, file, runs):
    page, document = show(file), examples_of(runs[4])
    settings: dict[str, Any] = {"tau": 1.25, "rho": 0.5, "alpha": None, "alpha_ls": 0.1}
    check(page, document, 0, settings)
    for name, key, value in (("tau", "tau", 2.4), ("rho", "rho", 0.85), ("ls", "alpha_ls", 0.35)):
        slide(page, name, value)
        settings[key] = value
        check(page, document, 0, settings)
    slide(page, "tau", 0.8)
    check(page, document, 0, settings | {"tau": 0.8})
    slide(page, "tau", 1.5)
    page.locator("#explorer input[value=fixed]").check()
    slide(page, "alpha", 0.6)
    check(page, document, 0, settings | {"tau": 1.5, "alpha": 0.6})
    slide(page, "alpha", 0)
    check(page, document, 0, settings | {"tau": 1.5, "alpha": 0.0})


def test_another_sample_can_be_chosen(show, file, runs):
    page = show(file)
    page.locator("#explorer select").select_option("1")
    check(page, examples_of(runs[4]), 1, {"tau": 1.25, "rho": 0.5, "alpha": None, "alpha_ls": 0.1})
    assert page.locator("#explorer img").get_attribute("src") == PIXEL
    assert "unlikely target" in page.locator("#explorer img").get_attribute("alt")
    context = page.locator('#explorer [data-part="context"]')
    assert context.inner_text() == "context of unlikely target"
    page.locator("#explorer select").select_option("2")  # of translation: 400 classes
    usual = {"tau": 1.25, "rho": 0.5, "alpha": None, "alpha_ls": 0.1}
    check(page, examples_of(runs[10]), 0, usual)
    assert "other 390 classes" in page.locator('#explorer [data-part="rest"]').inner_text()


# ------------------------------------------------------------------ the sentences


def test_sentences_are_filtered(show, file):
    page = show(file)
    page.locator(".browser input").fill("KÜCHE")
    options = page.locator('.browser [role="option"]')
    assert options.count() == 10
    assert all("Küche" in text for text in options.all_inner_texts())
    assert page.locator(".found").inner_text() == "10 of 60 sentences"
    assert "Küche" in page.locator(".sentence dd").first.inner_text()
    page.locator(".browser input").fill("no such word")
    assert page.locator(".found").inner_text() == "0 of 60 sentences"
    assert page.locator(".sentence dd").count() == 0
    page.locator(".browser input").fill("")
    assert page.locator(".sentence dd").count() == 8  # source, reference, six runs


def test_the_arrow_keys_walk_through_the_sentences(show, file):
    page = show(file)
    listbox = page.locator('.browser [role="listbox"]')
    listbox.focus()

    def selected() -> str:
        return page.locator('.browser [aria-selected="true"]').inner_text()

    walk = {"ArrowDown": 1, "PageDown": 11, "ArrowUp": 10, "End": 59, "Home": 0}
    for key, index in walk.items():
        page.keyboard.press(key)
        assert selected().endswith(f"({index})")
        assert page.locator(".sentence dd").first.inner_text() == selected()
        assert listbox.get_attribute("aria-activedescendant") == f"browser-1-{index}"


def test_a_chosen_sentence_is_scrolled_to_within_the_list(show, file):
    page = show(file, reduced_motion="reduce")
    assert page.evaluate("window.scrollY") == 0
    listbox = page.locator('.browser [role="listbox"]')
    listbox.focus()
    before = page.evaluate("window.scrollY")
    page.keyboard.press("End")
    top, bottom = page.evaluate(
        """() => { const box = (name) => document.querySelector(name).getBoundingClientRect();
             const list = box('.browser [role=listbox]'), chosen = box('[aria-selected=true]');
             return [chosen.top - list.top, list.bottom - chosen.bottom]; }"""
    )
    assert top >= 0
    assert bottom >= 0
    assert page.evaluate("window.scrollY") == before


def test_pointing_at_a_method_brings_it_forward(show, tmp_path):
    methods = [BASE, LS, LABO, *({"name": name} for name in ("cp", "fl", "kd", "poly"))]
    write_report([write_run(tmp_path / m["name"], m) for m in methods], tmp_path / "r.html")
    page = show(tmp_path / "r.html", reduced_motion="reduce")
    entry = page.locator('#g0-learning .legend [data-series="labo"]')

    def faded(name: str) -> bool:
        found: str = page.evaluate(
            """(name) => getComputedStyle(document.querySelector(
                 `#g0-learning svg [data-series="${name}"]`)).opacity""",
            name,
        )
        return float(found) < 0.3

    entry.focus()
    assert faded("ls")
    assert not faded("labo")
    entry.blur()
    assert not faded("ls")
    entry.hover()
    assert faded("ls")
    entry.click()
    page.mouse.move(5, 5)
    assert faded("ls")  # it stays until it is clicked again
    assert entry.get_attribute("aria-pressed") == "true"
    entry.click()
    page.mouse.move(5, 5)
    entry.blur()
    assert not faded("ls")


def test_a_token_shows_its_probability_on_focus(show, file):
    page = show(file)
    first = page.locator(".token").first
    first.focus()
    page.keyboard.press("ArrowRight")
    number, content, label = page.evaluate(
        """() => { const token = document.activeElement; return [token.dataset.p,
             getComputedStyle(token, '::after').content, token.getAttribute('aria-label')]; }"""
    )
    assert content == f'"{number}"'
    assert label.endswith(f"probability {number}")
    assert re.fullmatch(r"[01]\.\d{3}", number)


def test_markup_in_the_data_is_shown_as_text(show, tmp_path):
    run = write_run(tmp_path / "run", LABO, task="translation")
    make_hostile(run)
    write_report([run], tmp_path / "r.html")
    page = show(tmp_path / "r.html")
    assert page.title().startswith("labo report")
    assert "</script>" in page.locator(".sentence dd").first.inner_text()
    assert "</script>" in page.locator("#explorer tbody").inner_text()
    assert page.locator("#explorer img").is_hidden()


# ------------------------------------------------------------------ reading it


def luminance(colour: str) -> float:
    """WCAG relative luminance of ``rgb(r, g, b)`` or ``color(srgb r g b)``."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", colour)[:3]]
    channels = [n / 255 if colour.startswith("rgb") else n for n in numbers]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scheme, show, file):
    page = show(file, color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) > 0.5) == (scheme == "light")
    colours = page.evaluate(
        """() => Object.fromEntries(
             ['body', '.quiet', '.signature', 'nav a', 'th', 'svg text'].map((s) => {
               const style = getComputedStyle(document.querySelector(s));
               return [s, s.startsWith('svg') ? style.fill : style.color]; }))"""
    )
    for selector, colour in colours.items():
        assert contrast(colour, ground) >= (7 if selector == "body" else 4.5), selector
    methods = page.evaluate(
        """() => [0, 1, 2, 3, 4, 5, 6, 7].map((i) => { const key = document.createElement('i');
             key.className = `key m${i}`; document.body.append(key);
             return getComputedStyle(key).backgroundColor; })"""
    )
    assert all(contrast(colour, ground) >= 4.5 for colour in methods)


def test_the_button_changes_the_light(show, file):
    page = show(file, color_scheme="light")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    after = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert luminance(before) > 0.5 > luminance(after)
    assert page.locator("#theme").inner_text() == "Light"


def test_nothing_is_wider_than_a_phone(show, file):
    page = show(file, viewport=PHONE, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    page.locator(".token").last.hover()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_no_column_is_cut_in_a_window_of_1280_pixels(show, tmp_path):
    methods = (BASE, LS, LABO | {"warmup_steps": 500})
    runs = [write_run(tmp_path / f"{m['name']}-{s}", m, s) for m in methods for s in (0, 1)]
    write_report(runs, tmp_path / "r.html")
    hidden = show(tmp_path / "r.html").evaluate(
        """() => [...document.querySelectorAll('.scroll')].map(
             (region) => region.scrollWidth - region.clientWidth)"""
    )
    assert len(hidden) == 3
    assert max(hidden) == 0


def test_everything_can_be_reached_by_tab(show, file):
    page = show(file)
    name = """() => { const e = document.activeElement;
      return e.id || e.className || e.getAttribute('role') || e.type; }"""
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(name))
    assert {"theme", "scroll", "listbox", "search", "token", "radio"} <= reached
    assert {"explorer-example", "explorer-tau", "explorer-rho", "explorer-ls"} <= reached
