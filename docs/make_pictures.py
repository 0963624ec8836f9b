"""Makes the README's pictures of one plan: the terminal as SVG, the page as PNG. Run it where Chromium is installed.

python docs/make_pictures.py
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

import hfopt
from hfopt.cli.plan import STYLES
from hfopt.report.one_screen import plan_lines
from hfopt.report.plan_page import plan_page
from hfopt.schema import PlanFacts

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
CONFIG, CARD = "configs/vit_finetune.yaml", "rtx 3070"
COMMAND = f'$ hfopt plan {CONFIG} --gpu "{CARD}" > planned.yaml'
WIDTH, HEIGHT = 1200, 800  # of the browser's window
COLOURS = 64


def terminal(facts: PlanFacts) -> str:
    """The report as a terminal of 100 columns shows it; the fonts are the reader's own."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(COMMAND, highlight=False, style="bold")
    for style, text in plan_lines(facts, file="planned.yaml"):
        console.print(Text(text, style=STYLES[style]))
    svg = console.export_svg(title="hfopt plan")
    return re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.S)


def screenshot(page: bytes, target: Path) -> None:
    from PIL import Image

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("no Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        file, shot = Path(folder) / "plan.html", Path(folder) / "plan.png"
        file.write_bytes(page)
        options = f"--headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=20000 --user-data-dir={folder}/profile"
        words = [program, *options.split(), f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}", file.as_uri()]
        subprocess.run(words, check=True, capture_output=True, timeout=300)
        with Image.open(shot) as image:
            image.convert("RGB").quantize(COLOURS).save(target, optimize=True)


def main() -> None:
    os.chdir(ROOT)  # the picture shows the path as the reader would type it
    plan = hfopt.plan(CONFIG, gpu=CARD, dry_run=False)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "terminal.svg").write_text(terminal(plan.facts))
    screenshot(plan_page(plan.facts, plan.charts), FOLDER / "page.png")


if __name__ == "__main__":
    main()
