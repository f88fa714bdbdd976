"""Writes the pictures on the page of the tour, docs/assets/report.png and terminal.png.

    python tools/pictures.py report runs/compare-digits/report.html
    python tools/pictures.py terminal labo train digits train.epochs=5

The first takes the first screen of a report. The second runs a command in a terminal of 100 columns
and takes what is on it at the end. Needs playwright and a chromium on the path.
"""

from __future__ import annotations

import fcntl
import html
import io
import os
import pty
import re
import shlex
import shutil
import struct
import sys
import termios
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
WIDTH, HEIGHT = 1280, 860
COLUMNS, LINES = 100, 60
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|(\r?\n|\r)|([^\x1b\r\n]+)")


def report(file: str) -> None:
    """The first screen of a report."""
    _write(Path(file).resolve().as_uri(), ASSETS / "report.png")


def terminal(command: list[str]) -> None:
    """The screen at the end of a command."""
    text = "\n".join([f"$ {shlex.join(command)}", *screen(_output(command))])
    style = (
        "body{margin:0;background:#16181b;width:max-content}"
        "pre{margin:0;padding:20px 24px;color:#e4e6e8;font:15px/1.4 monospace;"
        f"width:{COLUMNS}ch;white-space:pre-wrap;word-break:break-all}}"
    )
    page = (
        f"<!doctype html><meta charset=utf-8><style>{style}</style><pre>{html.escape(text)}</pre>"
    )
    file = ASSETS / "terminal.html"
    file.write_text(page, encoding="utf-8")
    try:
        _write(file.as_uri(), ASSETS / "terminal.png", "pre")
    finally:
        file.unlink()


def _output(command: list[str]) -> str:
    """What a command writes to a terminal."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(command[0], command, os.environ | {"COLUMNS": str(COLUMNS)})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    output = b""
    try:
        while part := os.read(terminal, 1 << 16):
            output += part
    except OSError:  # the child has closed it
        os.waitpid(child, 0)
    return output.decode("utf-8", "replace")


def screen(output: str) -> list[str]:
    r"""The lines of a terminal after some output of rich: without colors and what it erased.

    Example:
        >>> screen("one\r\ntwo\r\x1b[2K\x1b[1A\x1b[2Kthree")
        ['three']
    """
    lines = [""]
    for number, letter, move, text in _CONTROL.findall(output):
        if letter == "A":  # what is below is erased first
            del lines[-int(number or 1) :]
        elif letter == "K" or move == "\r":
            lines[-1] = ""
        elif move:
            lines.append("")
        else:
            lines[-1] += text
    while lines and not lines[-1].strip():
        lines.pop()
    return [line.rstrip() for line in lines]


def _write(address: str, out: Path, element: str | None = None) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(address)
        taken = page.locator(element).screenshot() if element else page.screenshot()
        picture = Image.open(io.BytesIO(taken))
        browser.close()
    # A palette of 256 colors keeps the file small.
    few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(out, optimize=True)
    print(f"wrote {out}")


if __name__ == "__main__":
    if sys.argv[1] == "report":
        report(sys.argv[2])
    else:
        terminal(sys.argv[2:])
