"""Checks of arguments: a value of the right kind within its bounds, or a ValueError that names it.

Promises: the message holds the argument, the value given and what is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

Config = TypeVar("Config")


def whole(name: str, value: Any, least: int, most: int | None = None, need: str = "") -> int:
    """`value` as an int, or a ValueError that names argument, value and what is accepted."""
    need = need or (f"at least {least}" if most is None else f"{least} to {most}")
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise ValueError(f"{name}={value!r}: need an int, {need}")
    number = int(value)
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}={value!r}: need {need}")
    return number


def flag(name: str, value: Any) -> bool:
    """`value` if it is a bool, or a ValueError that names the argument and the value."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: need True or False")
    return value


def has_methods(name: str, value: Any, *methods: str) -> None:
    """Raises a ValueError that names the argument and the first method that `value` lacks."""
    for method in methods:
        if isinstance(value, type) or not callable(getattr(value, method, None)):
            raise ValueError(f"{name}={value!r}: need an object with {method}()")


def number(name: str, value: Any) -> float:
    """`value` as a finite float, or a ValueError that names the argument and the value."""
    try:
        wrong = isinstance(value, bool | str | bytes) or not math.isfinite(value)
    except (TypeError, OverflowError):
        wrong = True
    if wrong:
        raise ValueError(f"{name}={value!r}: need a finite number")
    return float(value)


def config_of(kind: type[Config], name: str, value: Any, *needed: str) -> Config:
    """`value` as a `kind`: one already, or a mapping with the names of its fields.

    Raises:
        ValueError: neither, an unknown name, one of `needed` missing, or what `kind` refuses.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r}: need a {kind.__name__} or a mapping")
    known_names(name, value, [each.name for each in fields(kind)])  # type: ignore[arg-type]
    for each in needed:
        if each not in value:
            raise ValueError(f"{name} lacks {each}: need it")
    return kind(**value)


def known_names(name: str, value: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises a ValueError that names the argument and the first of its keys that is not known."""
    known = list(known)
    for each in value:
        if each not in known:
            raise ValueError(f"{name} holds {each!r}: need some of {', '.join(known) or 'nothing'}")
