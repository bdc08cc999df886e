"""The book's widgets. Each is a module of this folder, and the script beside it draws it.

A page asks for `softmax_keys.py` and `softmax-keys.js` by `<!-- widget: softmax-keys -->`. The
module's `document()` gives the JSON that the page carries, and its `NEEDS` names scripts of
`book/widgets` or of this folder that load before. Promises: a widget draws no number that is not in
its document or derived from it by a formula that a browser test holds against the module's own.
"""

from __future__ import annotations

import functools
import json
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.js")))
"""By which pages ask: a widget is there once its script is."""


def document(name: str) -> dict[str, Any]:
    """What a page that shows a widget carries: JSON types, the same each time."""
    found: dict[str, Any] = _module(name).document()
    return found


def scripts(name: str) -> tuple[str, ...]:
    """The scripts that draw a widget, in the order in which they load."""
    return (*getattr(_module(name), "NEEDS", ()), name)


@functools.cache
def embedded(name: str) -> str:
    """The document as text that may stand in a page's `<script>`."""
    text = json.dumps(document(name), ensure_ascii=True, separators=(",", ":"))
    return text.replace("</", "<\\/")


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name.replace('-', '_')}")
