"""What stands where the core imports something that is not the core: names that answer nothing.

Promises: a `Placeholder` may be imported, annotated with and handed on; whatever asks it for an
answer (a call, a comparison, a truth value, an instance check, an iteration) raises `StubError`
with its name. What is answered is listed in `answers.py`, each with its reason.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol


class StubError(Exception):
    """The core asked something that has no answer here; the message names what it asked.

    Not an AttributeError: `getattr(config, name, default)` in the core must not take its default
    in silence.
    """


class Loading(Protocol):
    """The namespace a stub belongs to, as far as the stub asks it."""

    version: str

    @property
    def is_loading(self) -> bool:
        """Whether a module's body is running."""
        ...


_ANNOTATIONS = (type, types.UnionType, types.GenericAlias)


def _is_private(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class Placeholder(type):
    """The class of every imported name that nobody answers for; its instances are the names.

    They are classes themselves, so that `X | None`, `list[X]` and `X[Y]` in annotations work.
    """

    def __new__(cls, name: str, bases: tuple[type, ...] = (), body: Any = None) -> Placeholder:
        for base in bases:  # `class Ours(X)` in the core: a class that is never made
            if isinstance(base, Placeholder):
                name = f"{name}, a subclass of {base.__name__},"
        return super().__new__(cls, name, bases, dict(body or {}))

    def __init__(
        cls, name: str, bases: tuple[type, ...] = (), body: Any = None, **named: Any
    ) -> None:
        super().__init__(name, bases, dict(body or {}))

    def _refuse(cls, asked: str) -> NoReturn:
        raise StubError(f"{cls.__name__} has no answer here: it was {asked}")

    def __call__(cls, *arguments: Any, **named: Any) -> NoReturn:
        cls._refuse("called")

    def __getattr__(cls, name: str) -> Placeholder:
        if _is_private(name):
            raise AttributeError(name)
        return Placeholder(f"{cls.__name__}.{name}")

    def __getitem__(cls, item: object) -> Placeholder:
        return cls

    def __instancecheck__(cls, instance: object) -> bool:
        cls._refuse(f"asked whether {type(instance).__name__} is an instance of it")

    def __subclasscheck__(cls, subclass: type) -> bool:
        cls._refuse(f"asked whether {subclass} is a subclass of it")

    def __bool__(cls) -> bool:
        cls._refuse("asked whether it is true")

    def __iter__(cls) -> NoReturn:
        cls._refuse("iterated over")

    def __len__(cls) -> int:
        cls._refuse("asked for its length")

    def __contains__(cls, item: object) -> bool:
        cls._refuse(f"asked whether it holds {item!r}")

    def __eq__(cls, other: object) -> bool:
        if cls is other:
            return True
        if other is None or isinstance(other, _ANNOTATIONS) or type(other).__module__ == "typing":
            return False  # annotations are compared when they are put together
        cls._refuse(f"compared with {other!r}")

    __hash__ = type.__hash__

    def __lt__(cls, other: object) -> bool:
        cls._refuse("compared")

    __le__ = __gt__ = __ge__ = __lt__

    def __add__(cls, other: object) -> NoReturn:
        cls._refuse("used in arithmetic")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __add__
    __and__ = __mod__ = __int__ = __float__ = __index__ = __add__


class Stub(types.ModuleType):
    """A module that is not loaded: the names that are answered, and placeholders while loading."""

    def __init__(self, name: str, namespace: Loading, answers: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._namespace = namespace
        self.__dict__.update(answers)

    def __getattr__(self, name: str) -> Any:
        if _is_private(name):
            raise AttributeError(name)
        if not self._namespace.is_loading:
            raise StubError(
                f"vLLM {self._namespace.version} asks for {self.__name__}.{name}, which has no "
                "answer here (conformance/real_core/answers.py)"
            )
        made = Placeholder(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Given:
    """An object whose every attribute is listed; reading another raises.

    A stand-in for a configuration, the sampling parameters or an adapter's request.
    """

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if _is_private(name):
            raise AttributeError(name)
        raise StubError(
            f"the core asks for {self.__dict__.get('_name')}.{name}, which has no answer here "
            "(conformance/real_core/answers.py)"
        )

    def __repr__(self) -> str:
        return f"<{self._name}>"
