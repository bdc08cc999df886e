"""The picture of a shared link, `book/social.png`: the title over the engine's own timeline.

Run `python book/figures/social.py` where playwright and a Chromium are; a person runs it after
`book/figures/engine-timeline.svg` has changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

BOOK = Path(__file__).resolve().parents[1]
PAGE = """<style>
body {{ margin: 0; width: 1200px; height: 630px; overflow: hidden; background: #161923;
       color: #f1f3f8; font: 30px/1.35 "DejaVu Sans", sans-serif; }}
h1 {{ margin: 48px 60px 8px; font-size: 54px; }}
p {{ margin: 0 60px 28px; color: #b9c2d6; }}
div {{ margin: 0 60px; padding: 16px; background: #fff; border-radius: 10px; }}
svg {{ display: block; width: 100%; height: auto; }}
</style>
<h1>The internals of vLLM</h1>
<p>rebuilt in numpy, and checked step by step against the real engine</p>
<div>{figure}</div>"""


def draw() -> None:
    """Write the picture."""
    from playwright.sync_api import sync_playwright

    figure = (BOOK / "figures" / "engine-timeline.svg").read_text(encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 630}, color_scheme="light")
        page.set_content(PAGE.format(figure=figure))
        page.screenshot(path=BOOK / "social.png")
        browser.close()


if __name__ == "__main__":
    draw()
