"""What a client may send, and what of it the engine is asked for; chats are in `protocol_chat.py`.

Promises: fields, defaults and what is refused are vLLM's, with its status, `type`, `param` and
`code`; messages are our own. Unknown fields are accepted and ignored, as there. Mirrors
`vllm/entrypoints/openai/completion/protocol.py:42` `CompletionRequest`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mini_vllm.entrypoints.openai.errors import APIError, FieldError
from mini_vllm.sampling_params import (
    CHECKPOINT_KNOBS,
    KNOBS,
    BeamSearchParams,
    SamplingParams,
)

_INT64 = {"ge": -(2**63), "le": 2**63 - 1}
TokenId = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class JsonSchema(Body):
    name: str
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuralTagResponseFormat(Body):
    type: Literal["structural_tag"]
    format: Any


class LegacyStructuralTag(Body):
    begin: str
    structural_tag_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    end: str


class LegacyStructuralTagResponseFormat(Body):
    """The older spelling of a structural tag."""

    type: Literal["structural_tag"]
    structures: list[LegacyStructuralTag]
    triggers: list[str]


AnyResponseFormat = ResponseFormat | StructuralTagResponseFormat | LegacyStructuralTagResponseFormat


class StructuredOutputs(Body):
    """Fields of `StructuredOutputsParams`, which checks them."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        kinds = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
        if (count := sum(getattr(self, kind) is not None for kind in kinds)) != 1:
            raise ValueError(f"{count} constraints: need one of {', '.join(kinds)}")
        return self


class RepetitionDetection(Body):
    """`vllm/sampling_params.py:115` `RepetitionDetectionParams`, as a body has it."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class Generation(Body):
    """What completions and chats have in common."""

    model: str | None = None
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    n: int | None = 1
    presence_penalty: float | None = 0.0
    response_format: AnyResponseFormat | None = None
    seed: int | None = Field(None, **_INT64)
    stop: str | list[str] | None = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float = 1.0
    stop_token_ids: list[int] | None = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**63 - 1)
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(0, **_INT64)
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_together(cls, data: Any) -> Any:
        """Fields that exclude or need one another."""
        if not isinstance(data, dict):
            return data
        if data.get("stream_options") and not data.get("stream"):
            raise FieldError("stream_options: need stream=true", "stream_options")
        if data.get("cache_salt") == "":
            raise ValueError("cache_salt='': need a text that is not empty")
        count = number_of(data, "prompt_logprobs")
        if count is not None:
            if data.get("stream") and (count > 0 or count == -1):
                raise FieldError(
                    "prompt_logprobs: not available with stream=true", "prompt_logprobs"
                )
            if count < -1:
                raise FieldError(
                    f"prompt_logprobs={count}: need 0 or more, or -1", "prompt_logprobs"
                )
        wanted = data.get("structured_outputs")
        if isinstance(wanted, dict):
            given = [kind for kind in ("json", "regex", "choice") if wanted.get(kind) is not None]
            if len(given) > 1:
                param = None if "messages" in data else "structured_outputs"
                both = " and ".join(given)
                raise FieldError(f"structured_outputs: {both}: need one of them", param)
        form = data.get("response_format")
        if (
            isinstance(form, dict)
            and form.get("type") == "json_schema"
            and not form.get("json_schema")
        ):
            raise FieldError(
                "response_format: type json_schema needs the field json_schema", "response_format"
            )
        return data

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def output_limit(self) -> tuple[str, int | None]:
        """Which field bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    def num_logprobs(self) -> int | None:
        """Alternatives wanted per output token; None for no log-probabilities."""
        raise NotImplementedError

    def _constraint(self) -> Any:
        """`StructuredOutputsParams` of `structured_outputs` and `response_format`, or None."""
        from mini_vllm.structured_output.params import StructuredOutputsParams

        kinds: dict[str, Any] = {}
        if self.structured_outputs is not None:
            named = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            kinds = {k: v for k, v in named.items() if k in StructuredOutputsParams.__slots__}
        form = self.response_format
        if isinstance(form, StructuralTagResponseFormat | LegacyStructuralTagResponseFormat):
            kinds["structural_tag"] = json.dumps(form.model_dump(by_alias=True))
        elif form is not None and form.type == "json_object":
            kinds["json_object"] = True
        elif form is not None and form.json_schema is not None:
            kinds["json"] = form.json_schema.json_schema
        if not kinds:
            return None
        if kinds.get("choice") is not None:
            kinds["choice"] = tuple(kinds["choice"])
        return StructuredOutputsParams(**kinds)

    def sampling_params(
        self, max_tokens: int, defaults: Mapping[str, Any], constraint: Any = None
    ) -> SamplingParams:
        """What the engine is asked for.

        Args:
            max_tokens: as `get_max_tokens` bounds it.
            defaults: the checkpoint's generation config, for fields that are not given.
            constraint: a `StructuredOutputsParams` that replaces the request's own.

        Raises:
            APIError: a value is out of range; `param` names the field where vLLM's answer does.
        """

        sent = {name: getattr(self, name) for name in KNOBS if name in type(self).model_fields}
        sent = {name: value for name, value in sent.items() if value is not None}
        knobs = {**CHECKPOINT_KNOBS, **defaults, **sent, "max_tokens": max_tokens}
        if math.isnan(knobs["temperature"]):  # JSON of Python's has it; upstream lets it pass
            knobs["temperature"] = defaults.get("temperature", 1.0)
        temperature, top_p = knobs["temperature"], knobs["top_p"]
        _check("temperature", temperature >= 0.0, temperature, "0 or more")
        _check("top_p", 0.0 < top_p <= 1.0, top_p, "more than 0, at most 1")
        _check("max_tokens", max_tokens >= 1, max_tokens, "at least 1")
        _check("allowed_token_ids", self.allowed_token_ids != [], [], "at least one token id")
        if self.logit_bias:
            bias = {int(k): min(100.0, max(-100.0, v)) for k, v in self.logit_bias.items()}
            knobs["logit_bias"] = bias
        if (wanted := self.repetition_detection) is not None:
            names = type(wanted).model_fields
            knobs["repetition_detection"] = {name: getattr(wanted, name) for name in names}
        return SamplingParams(**{
            **knobs, "seed": torch_seed(self.seed), "logprobs": self.num_logprobs(),
            "prompt_logprobs": self._prompt_logprobs(),
            "structured_outputs": constraint or self._constraint(),
        })  # fmt: skip

    def _prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def beam_search_params(self, max_tokens: int, defaults: Mapping[str, Any]) -> BeamSearchParams:
        """What a beam search is asked for."""
        temperature = self.temperature
        return BeamSearchParams(
            beam_width=1 if self.n is None else self.n, max_tokens=max_tokens,
            ignore_eos=self.ignore_eos, length_penalty=self.length_penalty,
            temperature=defaults.get("temperature", 1.0) if temperature is None else temperature,
        )  # fmt: skip


def torch_seed(seed: int | None) -> int | None:
    """A seed that torch takes, as it takes it: those below 0 count down from 2^64 - 1.

    -1 is none, as `vllm/sampling_params.py:398` `SamplingParams.__post_init__` has it.
    """
    return None if seed is None or seed == -1 else seed % (2**64 - 1) if seed < 0 else seed


def number_of(data: Mapping[str, Any], name: str) -> float | None:
    """A field that upstream compares before any type is asked for, or None.

    Raises:
        APIError: it is there and cannot be compared.
    """
    value = data.get(name)
    if value is not None and not isinstance(value, int | float):
        raise APIError(f"{name}={value!r}: need a number")
    return value


def _check(param: str, right: bool, value: Any, need: str) -> None:
    if not right:
        raise APIError(f"{param}={value}: need {need}", param=param)


class CompletionRequest(Generation):
    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_prompt(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        count = number_of(data, "logprobs")
        if count is not None and count < 0:
            raise FieldError(f"logprobs={count}: need 0 or more", "logprobs")
        if data.get("prompt") is None or data["prompt"] == "":
            raise ValueError("prompt: need a text or token ids that are not empty")
        return data

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def _prompt_logprobs(self) -> int | None:
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    def prompts(self) -> list[str | list[int]]:
        """Each prompt of the request.

        Raises:
            APIError: there is none.
        """
        if self.prompt is None or self.prompt == []:
            raise APIError("prompt: need at least one")
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
