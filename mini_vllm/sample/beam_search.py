"""Beam search: the likeliest continuations, found by steps of one token.

Promises: every step asks the engine for one token of every live beam, so full blocks of a beam are
computed once and found again in the prefix cache; a beam that ends leaves the search and makes no
room. Mirrors `vllm/entrypoints/generate/beam_search/offline.py:30`
`BeamSearchOfflineMixin.beam_search`; a server grows the same `Search` by requests that step with
all others.
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
class Search:
    """The beams of one prompt, for any caller that asks for their tokens."""

    params: BeamSearchParams
    eos_token_id: int | None
    live: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)

    def one_token(self) -> SamplingParams:
        """What each live beam asks for in a step."""
        most = 2 * self.params.beam_width
        return SamplingParams(logprobs=most, max_tokens=1, temperature=self.params.temperature)

    def grow(self, found: Sequence[Mapping[int, Logprob]]) -> None:
        """Go on with the best of what may follow; `found` has the candidates of each live beam."""
        eos = None if self.params.ignore_eos else self.eos_token_id
        grown: list[BeamSearchSequence] = []
        for beam, candidates in zip(self.live, found, strict=True):
            for token, logprob in candidates.items():
                longer = BeamSearchSequence(
                    [*beam.tokens, token],
                    [*beam.logprobs, dict(candidates)],
                    beam.cum_logprob + logprob.logprob,
                )
                (self.completed if token == eos else grown).append(longer)
        self.live = self._best(grown)

    def best(self) -> list[BeamSearchSequence]:
        """The best `beam_width` of all, the best first."""
        return self._best(self.completed + self.live)

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        def score(beam: BeamSearchSequence) -> float:
            return beam.score(self.eos_token_id, self.params.length_penalty)

        return sorted(beams, key=score, reverse=True)[: self.params.beam_width]


def check_width(params: BeamSearchParams, max_logprobs: int, vocab_size: int) -> None:
    """Refuse a width that asks for more candidates than an engine gives.

    Raises:
        ValueError: twice the width is more than `max_logprobs` (-1: the vocabulary).
    """
    if 2 * params.beam_width > (vocab_size if max_logprobs == -1 else max_logprobs):
        raise ValueError(
            f"beam_width={params.beam_width}: need 2 * beam_width at most "
            f"max_logprobs={max_logprobs}"
        )


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
    check_width(params, engine.inputs.max_logprobs, engine.inputs.vocab_size)
    eos, searches = engine.tokenizer.eos_token_id, []
    for prompt in prompts:
        search = Search(params, eos, [])
        whole = replace(search.one_token(), max_tokens=params.max_tokens)
        _, [request] = engine.inputs.process(_plain(prompt), whole)
        search.live.append(BeamSearchSequence(request.prompt_token_ids))
        searches.append(search)
    for _ in range(params.max_tokens):
        beams = [beam.tokens for search in searches for beam in search.live]
        if not beams:
            break
        outputs = iter(engine.generate(beams, searches[0].one_token()))
        for search in searches:
            search.grow([(next(outputs).outputs[0].logprobs or [{}])[0] for _ in search.live])
    results = [BeamSearchOutput(search.best()) for search in searches]
    for beam in (beam for result in results for beam in result.sequences):
        beam.text = engine.tokenizer.decode(beam.tokens)
    return results


def _plain(prompt: Any) -> Any:
    """The text or ids of a prompt in upstream's form; anything else as it is."""
    if isinstance(prompt, Mapping):
        for name in ("prompt_token_ids", "prompt"):
            if name in prompt:
                return prompt[name]
    return prompt
