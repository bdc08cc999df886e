"""Checks of arguments: a value of the right kind within its bounds, or a ValueError that names it.

Promises: the message holds the argument, the value given and what is accepted.
"""

from __future__ import annotations

import math
from typing import Any


def whole(name: str, value: Any, least: int, most: int | None = None, need: str = "") -> int:
    """`value` as an int, or a ValueError that names argument, value and what is accepted."""
    need = need or (f"at least {least}" if most is None else f"{least} to {most}")
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise ValueError(f"{name}={value!r}: need an int, {need}")
    number = int(value)
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}={value!r}: need {need}")
    return number


def number(name: str, value: Any) -> float:
    """`value` as a finite float, or a ValueError that names the argument and the value."""
    try:
        wrong = isinstance(value, bool | str | bytes) or not math.isfinite(value)
    except (TypeError, OverflowError):
        wrong = True
    if wrong:
        raise ValueError(f"{name}={value!r}: need a finite number")
    return float(value)
