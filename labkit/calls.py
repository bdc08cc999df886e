"""What functions were called with and gave back, printed as it happens: a hunt's only evidence.

Promises: what is watched behaves as before (generators and coroutines are left alone); a line is
bounded, whatever the values are.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdict = 12
_SHORT.maxstring = _SHORT.maxother = 90
LONGEST = 220
"""Characters of a line."""


def watch(module: dict[str, Any], names: Sequence[str], say: Callable[[str], Any] = print) -> None:
    """Wrap functions and methods of a module, so that each call is said.

    Args:
        module: its namespace, which is changed.
        names: "function", "Class.method", or "Class" for all of its own methods, private ones too.
        say: takes one line per call, when it has returned or raised.
    """
    for name in names:
        owner, _, attribute = name.rpartition(".")
        if owner:
            _replace(module.get(owner), attribute, name, say)
        elif inspect.isclass(found := module.get(name)):
            owns = [key for key in vars(found) if not key.startswith("__") or key == "__init__"]
            for own in owns:
                _replace(found, own, f"{name}.{own}", say)
        elif inspect.isfunction(found):
            module[name] = _said(found, name, say, bound=False)


def _replace(owner: Any, attribute: str, name: str, say: Callable[[str], Any]) -> None:
    found = vars(owner).get(attribute) if inspect.isclass(owner) else None
    if inspect.isfunction(found):
        setattr(owner, attribute, _said(found, name, say, bound=True))


def _said(
    function: Callable[..., Any], name: str, say: Callable[[str], Any], bound: bool
) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [_text(each) for each in (args[1:] if bound else args)]
        given += [f"{key}={_text(value)}" for key, value in kwargs.items()]
        begun = f"{name}({', '.join(given)})"
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            say(f"{begun} raises {type(error).__name__}"[:LONGEST])
            raise
        say(f"{begun} -> {_text(result)}"[:LONGEST])
        return result

    return call


def _text(value: Any) -> str:
    try:
        return " ".join(_SHORT.repr(value).split())
    except Exception as error:  # of the learner's own __repr__
        return f"<{type(value).__name__}: {type(error).__name__}>"
