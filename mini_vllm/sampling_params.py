"""What one request asks of the sampler and the stop check. Frozen, checked when it is made.

Promises: a wrong value is a ValueError that names the argument, the value and what is accepted.
Mirrors `vllm/sampling_params.py:168` `SamplingParams` and `vllm/sampling_params.py:977`
`BeamSearchParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from mini_vllm.checks import number, whole

MIN_TEMPERATURE = 0.01
"""Positive temperatures below it are raised to it, as upstream's `_MAX_TEMP` does: smaller ones
overflow the division and are greedy in all but name."""

MOST_SEQUENCES = 16384
"""Bound on `n`, as upstream's `VLLM_MAX_N_SEQUENCES`."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Bound on `logprob_token_ids`, upstream's."""


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """When an output that repeats itself ends; as `vllm/sampling_params.py:115`
    `RepetitionDetectionParams`."""

    max_pattern_size: int = 0
    """Longest pattern in tokens that is looked for; 0 is off."""
    min_pattern_size: int = 0
    """Shortest one; 0 means 1."""
    min_count: int = 0
    """How often in a row the pattern must end the output, at least twice."""

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_count"):
            whole(name, getattr(self, name), 0)
        most = f"0 to max_pattern_size={self.max_pattern_size}"
        whole("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size, most)
        if self.max_pattern_size > 0 and self.min_count < 2:
            raise ValueError(f"min_count={self.min_count}: need at least 2, or max_pattern_size=0")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks for.

    Greedy by default, unlike upstream, whose default temperature is 1.0. Greedy resets `top_k`,
    `top_p` and `min_p`, which could not change it.
    """

    temperature: float = 0.0
    """0 is greedy; a positive value below `MIN_TEMPERATURE` becomes that."""
    top_k: int = 0
    """Draw among the k likeliest; 0 or -1 is off."""
    top_p: float = 1.0
    """Draw among the smallest set whose probability reaches p; 1.0 is off."""
    seed: int | None = None
    """Of this request's own random numbers; None or -1 gives it a stream of the engine's."""
    max_tokens: int = 16
    ignore_eos: bool = False
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest; 0.0 is off."""
    min_tokens: int = 0
    """No EOS, stop token or stop string before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt: read no cached block, but still leave blocks for others. None: True
    when `prompt_logprobs` asks for the logits of every prompt token."""
    n: int = 1
    """Completions of one prompt; more than one needs a temperature."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token in the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit once per occurrence in the output, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of the prompt's and output's tokens."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be sampled; None allows all."""
    bad_words: tuple[str, ...] = ()
    """Texts that may not be generated: the last token of each is banned after the others."""
    stop: tuple[str, ...] = ()
    """Texts that end the request, one text or several; not part of its text unless
    `include_stop_str_in_output`."""
    include_stop_str_in_output: bool = False
    """Keep the stop text, or the stop token's text, in the output."""
    logprobs: int | None = None
    """Log-probabilities per output token: of the sampled and of this many likeliest tokens, before
    anything edits the logits; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    logprob_token_ids: tuple[int, ...] | None = None
    """Log-probabilities of exactly these ids per output token, besides the sampled one, in place of
    the likeliest; as `vllm/sampling_params.py:247` `SamplingParams.logprob_token_ids`."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends an output that repeats itself; a mapping of its fields will do."""
    thinking_token_budget: int | None = None
    """Tokens of reasoning after which its end is forced; -1 is off. The engine needs
    `reasoning_config`."""
    structured_outputs: Any = None
    """A `structured_output.StructuredOutputsParams`: what the output must match; None is free."""
    _bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Set by the engine, which has the tokenizer."""

    def __post_init__(self) -> None:
        self._check_filters()
        self._check_edits()
        self._check_ends()
        self._check_outputs()
        if self.temperature == 0.0:
            if self.n > 1:
                raise ValueError(f"n={self.n}: need 1 with temperature=0.0, which has one answer")
            for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
                object.__setattr__(self, name, off)

    def _check_filters(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            number(name, getattr(self, name))
        if self.temperature < 0.0:
            raise ValueError(f"temperature={self.temperature}: need at least 0 (0 is greedy)")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
        whole("top_k", self.top_k, -1, need="-1 or 0 (off) or a positive count")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: need a value in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p}: need a value in [0, 1]")
        if self.seed is not None:
            whole("seed", self.seed, -1, need="a non-negative int or None")
            if self.seed == -1:
                object.__setattr__(self, "seed", None)

    def _check_edits(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= number(name, getattr(self, name)) <= 2.0:
                raise ValueError(f"{name}={getattr(self, name)}: need a value in [-2, 2]")
        if number("repetition_penalty", self.repetition_penalty) <= 0.0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: need more than 0")
        bias = self.logit_bias
        if bias is not None:
            if not isinstance(bias, Mapping):
                raise ValueError(f"logit_bias={bias!r}: need token ids and numbers, or None")
            need = "token ids as keys, 0 or more"
            checked = {
                whole("logit_bias", token, 0, need=need): number(f"logit_bias[{token}]", value)
                for token, value in bias.items()
            }
            object.__setattr__(self, "logit_bias", checked or None)
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise ValueError("allowed_token_ids=(): need at least one token id, or None")
            object.__setattr__(self, "allowed_token_ids", ids)
        object.__setattr__(self, "bad_words", _texts("bad_words", self.bad_words))

    def _check_ends(self) -> None:
        whole("max_tokens", self.max_tokens, 1)
        most = f"0 to max_tokens={self.max_tokens}"
        whole("min_tokens", self.min_tokens, 0, self.max_tokens, most)
        ids = _token_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        if self.repetition_detection is not None:
            self._check_repetition()
        if self.thinking_token_budget is not None:
            whole("thinking_token_budget", self.thinking_token_budget, -1)
            if self.thinking_token_budget == -1:
                object.__setattr__(self, "thinking_token_budget", None)
            elif self.structured_outputs is not None:
                raise ValueError("thinking_token_budget: need None with structured_outputs")

    def _check_repetition(self) -> None:
        wanted = self.repetition_detection
        names = [field.name for field in fields(RepetitionDetectionParams)]
        if isinstance(wanted, Mapping):
            if unknown := [name for name in wanted if name not in names]:
                raise ValueError(
                    f"repetition_detection has {unknown[0]!r}: need some of {', '.join(names)}"
                )
            wanted = RepetitionDetectionParams(**wanted)
        if not isinstance(wanted, RepetitionDetectionParams):
            raise ValueError(
                f"repetition_detection={wanted!r}: need RepetitionDetectionParams, a mapping of "
                f"{', '.join(names)}, or None"
            )
        on = wanted if wanted.max_pattern_size else None
        object.__setattr__(self, "repetition_detection", on)

    def _check_outputs(self) -> None:
        whole("n", self.n, 1, MOST_SEQUENCES)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                count = 1 if count is True else count  # as upstream
                whole(name, count, -1, need="0 or more, -1 (the whole vocabulary), or None")
                object.__setattr__(self, name, count)
        if self.logprob_token_ids is not None:
            self._check_logprob_token_ids()
        if self.prompt_logprobs is not None and self.skip_reading_prefix_cache is False:
            raise ValueError(
                "skip_reading_prefix_cache=False: need None or True with prompt_logprobs"
            )
        if self.skip_reading_prefix_cache is None:
            object.__setattr__(self, "skip_reading_prefix_cache", self.prompt_logprobs is not None)

    def _check_logprob_token_ids(self) -> None:
        ids = _token_ids("logprob_token_ids", self.logprob_token_ids)
        if not 1 <= len(ids) <= MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(
                f"logprob_token_ids holds {len(ids)} ids: need 1 to {MAX_LOGPROB_TOKEN_IDS}, "
                "or None"
            )
        if self.logprobs not in (None, len(ids)):
            raise ValueError(
                f"logprobs={self.logprobs}: need None or {len(ids)}, the number of "
                "logprob_token_ids"
            )
        object.__setattr__(self, "logprob_token_ids", ids)

    @property
    def num_logprobs(self) -> int | None:
        """How many log-probabilities each output token has besides its own; None: no token has any.

        As `vllm/sampling_params.py:649` `SamplingParams.num_logprobs`.
        """
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    def child(self, index: int) -> Self:
        """Completion `index` of `n` as a request of its own.

        Mirrors `vllm/v1/engine/parallel_sampling.py:52` `ParentRequest._get_child_sampling_params`.
        """
        return replace(self, n=1, seed=None if self.seed is None else self.seed + index)


KNOBS = tuple(field.name for field in fields(SamplingParams) if not field.name.startswith("_"))
"""Their names: who carries a request from a client to the engine passes on those it has, so that a
new one is a field above and where clients may send it."""

CHECKPOINT_KNOBS = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
"""Those that a checkpoint may set for what a server is sent, and what holds where it does not. As
`vllm/entrypoints/openai/completion/protocol.py:211`
`CompletionRequest._DEFAULT_SAMPLING_PARAMS`."""


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """What a beam search asks for; see `sample/beam_search.py`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Of the requests underneath. They are judged by logits that no temperature has touched."""
    length_penalty: float = 1.0
    """Scores are divided by the length, prompt included, to this power."""

    def __post_init__(self) -> None:
        whole("beam_width", self.beam_width, 1)
        whole("max_tokens", self.max_tokens, 1)
        if number("temperature", self.temperature) < 0.0:
            raise ValueError(f"temperature={self.temperature}: need at least 0")
        number("length_penalty", self.length_penalty)


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    need = "a sequence of token ids, 0 or more"
    if not isinstance(ids, list | tuple | set | frozenset):
        raise ValueError(f"{name}={ids!r}: need {need}")
    return tuple(whole(name, token, 0, need=need) for token in ids)


def _texts(name: str, texts: Any) -> tuple[str, ...]:
    if texts is None:
        return ()
    found = (texts,) if isinstance(texts, str) else texts
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name}={texts!r}: need a text or a list of texts")
    if "" in found:
        raise ValueError(f"{name}={texts!r}: need texts that are not empty")
    return tuple(found)
