"""What the runtime of the pages is made of, as `book/play/pins.toml` holds it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "book" / "play" / "pins.toml"


@dataclass(frozen=True, slots=True)
class Pin:
    """One archive: its hash is sha512 in base64 for npm, hexadecimal sha256 for a wheel."""

    name: str
    version: str
    digest: str

    @property
    def npm(self) -> str:
        """The name npm gives the packed archive."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


_PINS = {
    part: tuple(Pin(name, **held) for name, held in pins.items())
    for part, pins in tomllib.loads(FILE.read_text(encoding="utf-8")).items()
}
[PYODIDE], [BUNDLER], [CARRIER], [NUMPY] = (
    _PINS[part] for part in ("pyodide", "bundler", "carrier", "numpy")
)
EDITOR, TOOLS = _PINS["editor"], _PINS["tools"]
CARRIED = "open_webui/frontend/pyodide/"
"""Where `CARRIER` has numpy."""
