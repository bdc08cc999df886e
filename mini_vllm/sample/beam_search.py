"""Beam search: the likeliest continuations, found by steps of one token.

Promises: every step asks the engine for one token of every live beam, so full blocks of a beam are
computed once and found again in the prefix cache; a beam that ends leaves the search and makes no
room. Mirrors `vllm/entrypoints/generate/beam_search/offline.py:30`
`BeamSearchOfflineMixin.beam_search`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mini_vllm.sample.logprobs import Logprob
from mini_vllm.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from mini_vllm.engine import LLMEngine


@dataclass(slots=True)
class BeamSearchSequence:
    """A prompt and one continuation of it."""

    tokens: list[int]
    """Prompt included, and EOS where it ended so."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Per generated token, the candidates of its step."""
    cum_logprob: float = 0.0
    """Of the generated tokens, natural logarithm."""
    text: str | None = None
    """Of all tokens, the prompt's too; set when the search is over."""

    def score(self, eos_token_id: int | None, length_penalty: float) -> float:
        """`cum_logprob` over length to the power of the penalty; EOS does not count.

        As `vllm/entrypoints/generate/beam_search/utils.py:137` `get_beam_search_score`.
        """
        length = len(self.tokens) - (self.tokens[-1] == eos_token_id)
        return self.cum_logprob / max(length, 1) ** length_penalty


@dataclass(slots=True)
class BeamSearchOutput:
    """The best `beam_width` sequences of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    live: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    engine: LLMEngine, prompts: Sequence[Any], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Search for all prompts together; results in prompt order.

    Args:
        engine: idle or not; the beams are requests like others.
        prompts: texts, lists of token ids, or upstream's `{"prompt": text}` and
            `{"prompt_token_ids": ids}`.
        params: width, length and how lengths compare.

    Raises:
        ValueError: a prompt is refused, would not fit with `max_tokens`, or the width asks for more
            candidates than `max_logprobs`. Nothing is run.
    """
    if not isinstance(params, BeamSearchParams):
        raise ValueError(f"params={params!r}: need BeamSearchParams")
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        raise ValueError(f"prompts={prompts!r}: need texts, or lists of token ids")
    width, most = params.beam_width, engine.inputs.max_logprobs
    if 2 * width > (engine.inputs.vocab_size if most == -1 else most):
        raise ValueError(f"beam_width={width}: need 2 * beam_width at most max_logprobs={most}")
    one_token = SamplingParams(logprobs=2 * width, max_tokens=1, temperature=params.temperature)
    whole = replace(one_token, max_tokens=params.max_tokens)
    searches = []
    for prompt in prompts:
        _, [request] = engine.inputs.process(_plain(prompt), whole)
        searches.append(_Search([BeamSearchSequence(request.prompt_token_ids)]))
    eos = None if params.ignore_eos else engine.tokenizer.eos_token_id

    def score(beam: BeamSearchSequence) -> float:
        return beam.score(engine.tokenizer.eos_token_id, params.length_penalty)

    for _ in range(params.max_tokens):
        beams = [beam for search in searches for beam in search.live]
        if not beams:
            break
        outputs = iter(engine.generate([beam.tokens for beam in beams], one_token))
        for search in searches:
            grown: list[BeamSearchSequence] = []
            for beam in search.live:
                candidates = (next(outputs).outputs[0].logprobs or [{}])[0]
                for token, logprob in candidates.items():
                    longer = BeamSearchSequence(
                        [*beam.tokens, token],
                        [*beam.logprobs, candidates],
                        beam.cum_logprob + logprob.logprob,
                    )
                    (search.completed if token == eos else grown).append(longer)
            search.live = sorted(grown, key=score, reverse=True)[:width]
    results = []
    for search in searches:
        best = sorted(search.completed + search.live, key=score, reverse=True)[:width]
        for beam in best:
            beam.text = engine.tokenizer.decode(beam.tokens)
        results.append(BeamSearchOutput(best))
    return results


def _plain(prompt: Any) -> Any:
    """The text or ids of a prompt in upstream's form; anything else as it is."""
    if isinstance(prompt, Mapping):
        for name in ("prompt_token_ids", "prompt"):
            if name in prompt:
                return prompt[name]
    return prompt
