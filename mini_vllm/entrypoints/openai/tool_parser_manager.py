"""Families of tool parsers by the names that `--tool-call-parser` takes, a plug-in's among them.

Promises: a family is imported when its name is asked for. A name that is not there, and a plug-in
that fails, is refused by name before a model is loaded; upstream logs the second and goes on
(`vllm/tool_parsers/abstract_tool_parser.py:338` `ToolParserManager.import_tool_parser`).

Mirrors `vllm/tool_parsers/abstract_tool_parser.py:192` `ToolParserManager`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mini_vllm.entrypoints.openai.tool_parsers import ToolParser

P = TypeVar("P", bound=type[ToolParser])

_FAMILIES = {
    "hermes": ("tool_parsers", "HermesStream"),
    "glm45": ("tool_parsers_glm", "Glm4MoeModelToolParser"),
    "glm47": ("tool_parsers_glm", "Glm47MoeModelToolParser"),
    "mistral": ("tool_parsers_mistral", "MistralToolParser"),
    "openai": ("tool_parsers_openai", "OpenAIToolParser"),
    "qwen3_coder": ("tool_parsers_qwen", "Qwen3CoderToolParser"),
}
"""Module and class by name; the names are upstream's."""
_PLUGGED_IN: dict[str, type[ToolParser]] = {}


def tool_parser_names() -> list[str]:
    """Every name that can be asked for."""
    return sorted({*_FAMILIES, *_PLUGGED_IN})


def register_tool_parser(name: str) -> Callable[[P], P]:
    """Have a server that is started with this name use the decorated class.

    Upstream lets a name be registered again; here it is refused.

    Raises:
        ValueError: a name that is taken, or what is not a `ToolParser`.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}: need the name that --tool-call-parser takes")
    if name in tool_parser_names():
        raise ValueError(f"name={name!r}: this tool parser is there already")

    def register(parser: P) -> P:
        if not (isinstance(parser, type) and issubclass(parser, ToolParser)):
            raise ValueError(f"{name}={parser!r}: need a subclass of ToolParser")
        _PLUGGED_IN[name] = parser
        return parser

    return register


def import_tool_parser(path: Path) -> None:
    """Run a file that registers a parser.

    Raises:
        ValueError: there is no such file, or it fails; what it raised is named.
    """
    name = f"tool_parser_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"tool_parser_plugin={str(path)!r}: need a file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(
            f"tool_parser_plugin={str(path)!r}: {type(error).__name__}: {error}"
        ) from error


def get_tool_parser(name: str) -> type[ToolParser]:
    """The class of a family.

    Raises:
        ValueError: there is none; the message says which there are.
    """
    if name in _PLUGGED_IN:
        return _PLUGGED_IN[name]
    if name not in _FAMILIES:
        raise ValueError(
            f"tool_call_parser={name!r}: need one of {', '.join(tool_parser_names())}, a name "
            "that tool_parser_plugin registers, or none"
        )
    module, found = _FAMILIES[name]
    parser: type[ToolParser] = getattr(
        importlib.import_module(f"mini_vllm.entrypoints.openai.{module}"), found
    )
    return parser
