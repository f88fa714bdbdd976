"""Writes docs/assets/report.png, the picture of a report on the page of the tour.

    labo demo && python tools/report_picture.py runs/demo/report.html

Needs playwright and a chromium on the path.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

OUT = Path(__file__).parents[1] / "docs" / "assets" / "report.png"
WIDTH, HEIGHT = 1280, 1500


def main(report: str) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(Path(report).resolve().as_uri())
        page.evaluate("window.scrollTo(0, 0)")
        picture = Image.open(io.BytesIO(page.screenshot()))
        browser.close()
    # A palette of 64 colors keeps the file small.
    picture.convert("RGB").quantize(64).save(OUT, optimize=True)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main(sys.argv[1])
