"""From what a caller asks to a request, or a refusal.

Promises: everything that could never be served is refused here, before anything of the engine is
touched, by a ValueError that names the argument, its value and what is accepted. Mirrors
`vllm/v1/engine/input_processor.py:36` `InputProcessor`.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mini_vllm.config import EngineConfig, SamplingParams, number, whole
from mini_vllm.feature import Feature, RequestInput
from mini_vllm.features import needed_for
from mini_vllm.models.registry import LoadedModel
from mini_vllm.parallel_sampling import child_id
from mini_vllm.request import Request

_request_numbers = itertools.count()
_MOST_PRIORITY = 1 << 62
_shown = reprlib.Repr()
_shown.maxother = _shown.maxstring = 200


def _plain(token: Any) -> Any:
    """A numpy integer as an int; anything else as it is, to be refused."""
    return int(token) if isinstance(token, np.integer) else token


def per_prompt(name: str, value: Any, count: int) -> Sequence[Any]:
    """A list with one for each of `count` prompts, from such a list or from one for all.

    Raises:
        ValueError: a list of another length.
    """
    values = value if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise ValueError(
            f"{name} has {len(values)} entries for {count} prompts: need one, or one per prompt"
        )
    return values


class InputProcessor:
    """Knows the bounds of one engine: vocabulary, context, pool."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        make_request: Callable[..., Request] = Request,
        features: Sequence[Feature] = (),
    ) -> None:
        self.features = features
        self.make_request = make_request
        self.cache, self.scheduler = config.cache, config.scheduler
        self.num_blocks_of = loaded.num_blocks_of
        self.max_model_len = config.scheduler.max_model_len
        self.tokenizer = loaded.tokenizer
        self.vocab_size = loaded.vocab_size
        self.num_prompt_ids = loaded.num_prompt_ids or loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.max_logprobs = config.max_logprobs
        self.takes_drafts = config.scheduler.num_speculative_tokens > 0

    def process(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        **options: Any,
    ) -> tuple[str, list[Request]]:
        """The id and the requests, `n` of them, of `LLMEngine.add_request`'s arguments.

        Raises:
            ValueError: see `LLMEngine.add_request`.
        """
        prompt, options = split_prompt(prompt, options)
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params={params!r}: need a SamplingParams")
        self._check_params(params)
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes | dict):
            token_ids = [t if isinstance(t, int) else _plain(t) for t in prompt]
        else:
            raise ValueError(f"prompt={prompt!r}: need a text or a list of token ids")
        self.check_fits(token_ids, params)
        serial = next(_request_numbers)
        if request_id is None:
            request_id = f"req-{serial}"
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id={request_id!r}: need a non-empty text")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ValueError(f"cache_salt={cache_salt!r}: need a non-empty text, or None")
        given = {name: value for name, value in options.items() if value is not None}
        inputs = self._process_features(params, token_ids, given)
        if inputs.token_ids is not token_ids:
            self.check_fits(token_ids := inputs.token_ids, params)
        if extra := self.eos_token_ids[1:]:  # the first is EOS, the others stop ids
            stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *extra)
            params = replace(params, stop_token_ids=stops)
        if params.bad_words:
            params = replace(params, _bad_words_token_ids=self._bad_words(params.bad_words))
        eos = self.eos_token_ids[0] if self.eos_token_ids else None
        arrival = float(serial) if arrival_time is None else number("arrival_time", arrival_time)
        priority = whole("priority", priority, -_MOST_PRIORITY, _MOST_PRIORITY)
        keys = [tuple(inputs.extra_keys)] if inputs.extra_keys else []  # a part may know none
        rest = eos, arrival, priority, cache_salt, *keys
        each = [(request_id, params)]
        if params.n > 1:
            each = [(child_id(i, request_id), params.child(i)) for i in range(params.n)]
        return request_id, [inputs.make_request(i, token_ids, p, *rest) for i, p in each]

    def _process_features(
        self, params: SamplingParams, token_ids: list[int], options: dict[str, Any]
    ) -> RequestInput:
        """What every open room makes of the wishes; a room that opens meanwhile comes last."""
        inputs = RequestInput(params, token_ids, self.make_request, options)
        for feature in self.features:
            feature.process_input(inputs)
        for name in options.keys() - inputs.accepted_options:
            raise ValueError(f"{name}={_shown.repr(options[name])}: need {needed_for(name)}")
        return inputs

    def _check_params(self, params: SamplingParams) -> None:
        """Refuse what this engine's vocabulary and features do not allow, with a ValueError."""
        if self.takes_drafts:  # as upstream's `_validate_spec_decode`
            if params.min_p > 0.0:
                raise ValueError(f"min_p={params.min_p}: need 0.0 with speculative_config")
            if params.logit_bias is not None:
                raise ValueError("logit_bias: need None with speculative_config")
            if params.logprob_token_ids is not None:
                raise ValueError("logprob_token_ids: need None with speculative_config")
        last = self.vocab_size - 1
        for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
            for token in getattr(params, name) or ():
                if token > last:
                    raise ValueError(f"{name} holds token id {token}: need ids from 0 to {last}")
        most = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name) or 0
            if (self.vocab_size if count == -1 else count) > most:
                raise ValueError(f"{name}={count}: need at most max_logprobs={most}")

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of `words`, at the start of a text and after a space.

        As `vllm/sampling_params.py:586` `SamplingParams.update_from_tokenizer`: the form with a
        space counts where it is a token of its own, not where it only puts a space in front.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            bare = tuple(self.tokenizer.encode(word.lstrip()))
            if not bare:
                raise ValueError(f"bad_words holds {word!r}: it has no token; leave it out")
            spaced = tuple(self.tokenizer.encode(" " + word.lstrip()))
            found.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        return tuple(found)

    def check_fits(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what no schedule could ever finish, with a ValueError."""
        if len(token_ids) == 0:
            raise ValueError("prompt is empty: need at least one token")
        last = self.vocab_size - 1
        most = self.num_prompt_ids - 1
        if self.takes_drafts or params.prompt_logprobs is not None:
            most = last  # padding is never drafted and has no probability
        for token in token_ids:
            if type(token) is not int or not 0 <= token <= most:
                raise ValueError(f"prompt holds token id {token!r}: need integers from 0 to {most}")
        longest = len(token_ids) + params.max_tokens
        if self.max_model_len is not None:
            self._check_length(len(token_ids), params, self.max_model_len)
            longest = min(longest, self.max_model_len)
        stops = {*params.stop_token_ids, *self.eos_token_ids}
        if params.min_tokens and len(stops) > last and stops >= set(range(last + 1)):
            raise ValueError(
                f"min_tokens={params.min_tokens}: need 0, since every token id is a stop token"
            )
        num_usable = self.cache.num_blocks - 1
        size = self.cache.block_size
        num_needed = -(-(longest - 1) // size)  # the last token is never computed
        if self.num_blocks_of is not None:
            budget = self.scheduler.max_num_batched_tokens
            num_needed = self.num_blocks_of(
                longest - 1, size, budget, self.max_model_len or longest
            )
        if num_needed > num_usable:
            raise ValueError(
                f"prompt of {len(token_ids)} tokens with max_tokens={params.max_tokens} needs "
                f"{num_needed} blocks of {self.cache.block_size}: the pool has {num_usable}; "
                f"raise num_blocks or lower max_tokens"
            )

    @staticmethod
    def _check_length(num_tokens: int, params: SamplingParams, limit: int) -> None:
        if num_tokens >= limit:
            raise ValueError(
                f"prompt has {num_tokens} tokens: need fewer than max_model_len={limit}, "
                "so that one output token fits"
            )
        if num_tokens + params.min_tokens > limit:
            raise ValueError(
                f"min_tokens={params.min_tokens}: after a prompt of {num_tokens} tokens "
                f"max_model_len={limit} leaves {limit - num_tokens}"
            )


Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or one of them under "prompt" or "prompt_token_ids" beside what a room takes
with it."""


def split_prompt(
    prompt: Prompt, options: Mapping[str, Any]
) -> tuple[str | Sequence[int], dict[str, Any]]:
    """The text or the ids of a prompt, and the options with those that came in it.

    Raises:
        ValueError: a mapping with neither or both of "prompt" and "prompt_token_ids", or with an
            option that is given beside it as well.
    """
    if not isinstance(prompt, Mapping):
        return prompt, dict(options)
    rest = dict(prompt)
    own = [rest.pop(name) for name in ("prompt", "prompt_token_ids") if name in rest]
    if len(own) != 1:
        raise ValueError(f"prompt={_shown.repr(prompt)}: need one of prompt and prompt_token_ids")
    for name in rest:
        if options.get(name) is not None:
            raise ValueError(f"{name}: given in the prompt and beside it; need one of them")
    return own[0], {**options, **rest}


def one_each(
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    options: Mapping[str, Any],
) -> list[tuple[str | Sequence[int], SamplingParams | None, dict[str, Any]]]:
    """Each prompt with its parameters and options, one for all or one per prompt.

    Raises:
        ValueError: not a sequence of prompts, or lengths differ.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        raise ValueError(f"prompts={prompts!r}: need texts, or lists of token ids")
    if not isinstance(sampling_params, SamplingParams | Sequence | None):
        raise ValueError(
            f"sampling_params={sampling_params!r}: need a SamplingParams, or one per prompt"
        )
    params = per_prompt("sampling_params", sampling_params, len(prompts))
    each = {name: per_prompt(name, value, len(prompts)) for name, value in options.items()}
    own = [{name: values[i] for name, values in each.items()} for i in range(len(prompts))]
    split = [split_prompt(prompt, mine) for prompt, mine in zip(prompts, own, strict=True)]
    return [(text, p, mine) for (text, mine), p in zip(split, params, strict=True)]
