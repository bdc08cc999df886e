"""What a request may ask for, and what an engine decides for all of them.

Promises: vLLM's names and defaults; one constraint and only one; a wrong value is a ValueError that
names it. Mirrors `vllm/sampling_params.py:41` `StructuredOutputsParams` and
`vllm/config/structured_outputs.py:18` `StructuredOutputsConfig`.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from mini_vllm.structured_output.expressions import GrammarError
from mini_vllm.structured_output.reasoning import check_parser

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
BACKENDS = ("auto", "xgrammar", "guidance")

Key = tuple[str, str, bool, bool]
"""Kind, text, and the two options of JSON: what decides a grammar."""


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """A constraint on one request's output: exactly one of the six kinds."""

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON Schema, as text or as an object."""
    regex: str | None = None
    """The whole output matches it."""
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """EBNF in xgrammar's dialect, `root ::= ...`."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON with `, ` and `: ` and no other space; else any space between its parts."""
    disable_additional_properties: bool = False
    """Objects whose schema names properties have no others."""
    whitespace_pattern: str | None = None
    """Taken for upstream's sake; only its backend `outlines` reads it, so it must be None."""
    structural_tag: str | None = None
    """Free text with tags in it, as JSON text: `{"type": "structural_tag", "format": {...}}` or the
    older `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`. JSON in a tag may have
    any space between its parts, whatever `disable_any_whitespace` says."""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise ValueError(f"structured_outputs: need exactly one of {', '.join(KINDS)}: {named}")
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name}={value!r}: need a text")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: need True or False")
        if self.json_object is False:
            raise ValueError("json_object=False: need True, or another constraint")
        if self.whitespace_pattern is not None:
            raise ValueError(f"whitespace_pattern={self.whitespace_pattern!r}: not supported")
        if self.grammar is not None and not self.grammar.strip():
            raise ValueError(f"grammar={self.grammar!r}: need a grammar")
        self._check_choice()
        self._check_json()

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        texts = self.choice if isinstance(self.choice, list | tuple) else None
        if not texts or not all(isinstance(each, str) for each in texts):
            raise ValueError(f"choice={self.choice!r}: need texts, at least one")
        object.__setattr__(self, "choice", tuple(texts))

    def _check_json(self) -> None:
        if self.json is None or isinstance(self.json, Mapping | bool):
            return
        try:
            found = json_text.loads(self.json)
        except (TypeError, ValueError, RecursionError):
            found = None
        if not isinstance(found, Mapping | bool):
            raise ValueError(f"json={str(self.json)[:60]!r}: need a JSON Schema")

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def key(self, config: StructuredOutputsConfig) -> Key:
        """What decides the grammar: equal keys share one.

        As `vllm/v1/structured_output/request.py:77` `get_structured_output_key`, with the options.

        Raises:
            GrammarError: the schema holds what JSON has not.
        """
        compact = config.disable_any_whitespace or self.disable_any_whitespace
        closed = config.closed or self.disable_additional_properties
        if self.json is not None:
            spec = self.json
            if not isinstance(spec, str):
                try:
                    spec = json_text.dumps(spec)
                except (TypeError, ValueError, RecursionError) as error:
                    raise GrammarError(f"json: not a JSON Schema ({error})") from None
            return "json", spec, compact, closed
        if self.json_object:
            return "json", '{"type": "object"}', compact, closed
        if self.choice is not None:
            return "choice", json_text.dumps(list(self.choice)), False, False
        if self.structural_tag is not None:
            if config.backend == "guidance":
                raise GrammarError("structural_tag: need backend auto or xgrammar")
            return "structural_tag", self.structural_tag, False, True
        return self.kind, getattr(self, self.kind), False, False


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """What `LLM(structured_outputs_config={...})` takes."""

    backend: str = "auto"
    """Whose reading of JSON Schema: "xgrammar" has no property beside the named ones and refuses
    what xgrammar refuses; "guidance" follows the standard; "auto" is the first, without its
    refusals where the constraint can be kept."""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""
    """Says where a model's reasoning ends, see `reasoning.PARSERS`. Before that a request's rows
    are not masked and its tokens do not advance its grammar."""
    enable_in_reasoning: bool = False
    """Constrain from the first token in spite of the parser."""
    jump_ahead: bool = False
    """Ours alone: with `speculative_config`, draft the tokens that a grammar forces, so that they
    take one step together. The texts stay the same."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r}: need one of {', '.join(BACKENDS)}")
        check_parser(self.reasoning_parser)
        for name in (
            "disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning",
            "jump_ahead",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: need True or False")
        if self.jump_ahead and self.reasoning_parser:
            raise ValueError("jump_ahead=True: need no reasoning_parser")
        if self.disable_any_whitespace and self.backend == "auto":
            raise ValueError("disable_any_whitespace=True: need backend xgrammar or guidance")
        if self.disable_additional_properties and self.backend != "guidance":
            raise ValueError("disable_additional_properties=True: need backend guidance")

    @property
    def closed(self) -> bool:
        """Whether objects whose schema names properties have no others."""
        return self.backend != "guidance" or self.disable_additional_properties

    @classmethod
    def of(cls, given: Mapping[str, Any] | StructuredOutputsConfig) -> Self:
        """From vLLM's dict.

        Raises:
            ValueError: an unknown key (the known ones are listed), or a value out of range.
        """
        if isinstance(given, cls):
            return given
        known = [each.name for each in fields(cls)]
        if not isinstance(given, Mapping):
            raise ValueError(f"structured_outputs_config={given!r}: need a dict")
        for name, value in given.items():
            if name not in known:
                raise ValueError(
                    f"structured_outputs_config: {name}={value!r}: there are {', '.join(known)}"
                )
        return cls(**given)
