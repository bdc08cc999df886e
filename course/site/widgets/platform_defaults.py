"""Choose a platform, a use and a flag, and see which settings move.

Promises: every value is one that the pin's own configuration took on; the recording is made by
`conformance/features/engine/platform_defaults.py`, and the browser compares rows of it.
Mirrors `vllm/platforms/interface.py:437` `Platform.check_and_update_config`.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from conformance.features.engine.platform_defaults import FLAGS, KEPT, PLATFORMS, USES

NEEDS = ("decide",)
KEYS = ("platform", "use", "flag")
WORDS = {"cpu": "CPU", "cuda": "CUDA, an H100 with 80 GiB"}


@functools.cache
def rows() -> list[dict[str, Any]]:
    """Each combination with its settings."""
    found: list[dict[str, Any]] = json.loads(KEPT.read_text(encoding="utf-8"))["rows"]
    return found


def row(platform: str, use: str, flag: str) -> dict[str, Any]:
    """The settings of one combination."""
    (found,) = [r for r in rows() if (r["platform"], r["use"], r["flag"]) == (platform, use, flag)]
    return {name: value for name, value in found.items() if name not in KEYS}


def _questions() -> list[dict[str, Any]]:
    asked = []
    for ask, picked, name in (
        ("A processor, vllm serve, --async-scheduling. Is it on?",
         ("cpu", "vllm serve", "--async-scheduling"), "async_scheduling"),
        ("A processor, --enable-lora. Which compilation?",
         ("cpu", "vllm serve", "--enable-lora"), "compilation"),
        ("An H100, LLM(...), no flag. The budget of a step?",
         ("cuda", "LLM(...)", "none"), "max_num_batched_tokens"),
        ("An H100, --enforce-eager. Who serves rms_norm first?",
         ("cuda", "vllm serve", "--enforce-eager"), "rms_norm"),
    ):  # fmt: skip
        answer = shown(row(*picked)[name])
        choices = sorted(
            {shown(row(p, u, f)[name]) for p in PLATFORMS for u in USES for f in FLAGS}
        )
        posed = dict(zip(KEYS, picked, strict=True))
        asked.append({"ask": ask, "picked": posed, "answer": answer, "choices": choices})
    return asked


def shown(value: Any) -> str:
    """A setting as the page writes it."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


@functools.cache
def document() -> dict[str, Any]:
    """The widget's document: the settings of every combination, in words."""
    table = {
        "|".join((p, u, f)): {name: shown(value) for name, value in row(p, u, f).items()}
        for p in PLATFORMS
        for u in USES
        for f in FLAGS
    }
    return {
        "platforms": [[name, WORDS[name]] for name in PLATFORMS], "uses": list(USES),
        "flags": list(FLAGS), "table": table, "questions": _questions(),
        "start": {"platform": "cpu", "use": "vllm serve", "flag": "none"},
    }  # fmt: skip
