"""The state of a live run in an address: settings, requests, aborts and a step, in a fragment.

Promises: what is written is read back equal; it is short, of a known version and bounded; anything
else is a ValueError that names the part. The state itself is not in it: replaying gives it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote_plus, unquote_to_bytes

VERSION = 1
MOST_CHARACTERS = 6000
"""Eight prompts of 200 bytes, each of them percent-encoded, stay below it."""

SETTINGS = {
    "budget": 32, "blocks": 23, "slots": 4, "block_size": 8, "threshold": 24, "chunked": 1,
    "caching": 1,
}  # fmt: skip
"""Names and defaults of version 1: a default is left out, and must not change."""

_NUMBER = re.compile(r"-?[0-9]{1,4}", re.ASCII)
_REQUEST = re.compile(r"(\d{1,4})\.(\d{1,4})\.(-?\d{1,4})\.(.+)", re.ASCII | re.DOTALL)
_ABORT = re.compile(r"(\d{1,4})\.([A-Z])", re.ASCII)
_LETTERS = re.compile(r"[\w.~+%-]+", re.ASCII)


def written(
    settings: Mapping[str, Any],
    requests: Sequence[Mapping[str, Any]],
    aborts: Sequence[tuple[int, str]],
    at: int,
) -> str:
    """The fragment of a run: `live=1&blocks=20&r=16.0.0.A+prompt&x=5.A&at=9`."""
    parts = [f"live={VERSION}"]
    parts += [f"{name}={settings[name]}" for name in SETTINGS if settings[name] != SETTINGS[name]]
    if settings["policy"] != "fcfs":
        parts.append(f"policy={settings['policy']}")
    parts += [
        f"r={one['max_tokens']}.{one['arrival']}.{one['priority']}.{quote_plus(one['prompt'])}"
        for one in requests
    ]
    parts += [f"x={step}.{name}" for step, name in aborts]
    return "&".join([*parts, f"at={at}"])


def read(link: str) -> dict[str, Any]:
    """The arguments of `live.start` that a fragment holds; a leading `#` may be there.

    Raises:
        ValueError: too long, of another version, or a part that is unknown, twice there or not of
            its form. Values out of range are for `live.start` to refuse.
    """
    if not isinstance(link, str) or len(link) > MOST_CHARACTERS:
        raise ValueError(f"link: need a text of at most {MOST_CHARACTERS} characters")
    first, *parts = link.removeprefix("#").split("&")
    if first != f"live={VERSION}":
        raise ValueError(f"link={first[:20]!r}...: need one that begins with live={VERSION}")
    settings: dict[str, Any] = {}
    requests: list[dict[str, Any]] = []
    aborts: list[tuple[int, str]] = []
    at: list[int] = []
    for part in parts:
        name, _, value = part.partition("=")
        if name == "r":
            requests.append(_request(value))
        elif name == "x" and (match := _ABORT.fullmatch(value)):
            aborts.append((int(match[1]), match[2]))
        elif name == "at" and not at and _NUMBER.fullmatch(value):
            at.append(int(value))
        elif name == "policy" and name not in settings and value in ("fcfs", "priority"):
            settings[name] = value
        elif name in SETTINGS and name not in settings and _NUMBER.fullmatch(value):
            settings[name] = int(value)
        else:
            raise ValueError(
                f"link: cannot read {part[:40]!r}: need r=, x=, at=, policy= or a setting"
            )
    if not requests:
        raise ValueError("link: has no request: need at least one r=...")
    settings = SETTINGS | {"policy": "fcfs"} | settings
    return {"settings": settings, "requests": requests, "aborts": aborts, "at": sum(at)}


def _request(value: str) -> dict[str, Any]:
    match = _REQUEST.fullmatch(value)
    if match is None or not _LETTERS.fullmatch(match[4]):
        raise ValueError(f"link: cannot read the request {value[:40]!r}")
    try:
        prompt = unquote_to_bytes(match[4].replace("+", " ")).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"link: the request {value[:40]!r} is not UTF-8") from None
    names = ("max_tokens", "arrival", "priority")
    numbers = {name: int(match[place + 1]) for place, name in enumerate(names)}
    return {"prompt": prompt, **numbers}
