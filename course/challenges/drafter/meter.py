"""Runs of a target model under a drafter. vLLM's: `vllm/v1/spec_decode/ngram_proposer.py:131`
`NgramProposer.propose`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from course.challenges.judge import Player, wholes
from mini_vllm.spec_decode.ngram import ngram_propose

TITLE = "Tokens that a model is about to say, guessed without a model"
UNIT = "runs"
FEWER = True
MARKS = (("bronze", 5, 4), ("vLLM's", 1, 1), ("silver", 19, 20))

K, MIN_N, MAX_N = 4, 2, 4
VOCABULARY = 1000


def workload(seed: str) -> dict[str, list[int]]:
    """`{"prompt", "text"}`, token ids: lines of some kinds, and the same lines edited."""
    rng = random.Random(seed)
    names = rng.sample(range(100, VOCABULARY), 40)
    kinds = []
    for _ in range(7):
        # A place of a line is always the same token, one of few, or any name (None).
        line: list[list[int] | None] = []
        for _ in range(rng.randrange(6, 14)):
            draw = rng.randrange(10)
            if draw < 6:
                line.append([rng.randrange(100)])
            else:
                line.append(rng.sample(names, 3) if draw < 8 else None)
        kinds.append(line)
    common = rng.sample(names, 6)

    def written(line: list[list[int] | None]) -> list[int]:
        pool = common if rng.randrange(3) else names
        return [rng.choice(place or pool) for place in line]

    lines = [written(rng.choice(kinds)) for _ in range(40)]
    prompt = [token for tokens in lines for token in tokens]
    old, new = rng.sample(common, 2)
    text: list[int] = []
    for tokens in lines:
        draw = rng.randrange(10)
        if draw < 2:
            text += written(rng.choice(kinds))
        if draw < 9:
            text += [new if token == old else token for token in tokens]
    return {"prompt": prompt, "text": text}


def _accepted(drafts: Sequence[int], rest: Sequence[int]) -> int:
    count = 0
    while count < min(len(drafts), len(rest)) and drafts[count] == rest[count]:
        count += 1
    return count


def play(answer: Callable[..., Player], load: dict[str, list[int]]) -> int:
    """Runs until the text is said."""
    text, at, runs = load["text"], 0, 0
    player = answer({"prompt": load["prompt"], "k": K})
    said: list[int] = []
    while at < len(text):
        drafts = wholes("draft()", player.call("draft", said), 0, VOCABULARY - 1, K)
        kept = _accepted(drafts, text[at:])
        said = text[at : at + kept + 1]
        at, runs = at + len(said), runs + 1
    return runs


def _runs(load: dict[str, list[int]], propose: Callable[[np.ndarray], Sequence[int]]) -> int:
    whole = np.array(load["prompt"] + load["text"], dtype=np.int32)
    at, runs = len(load["prompt"]), 0
    while at < len(whole):
        at += _accepted(list(propose(whole[:at])), whole[at:].tolist()) + 1
        runs += 1
    return runs


def vllm(load: dict[str, list[int]]) -> int:
    """Runs with vLLM's n-gram lookup."""
    return _runs(load, lambda context: ngram_propose(context, MIN_N, MAX_N, K))


def real() -> Callable[[dict[str, list[int]]], int]:
    """The same by the pinned tree's own lookup."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    def propose(context: np.ndarray) -> Sequence[int]:
        found = _find_longest_matched_ngram_and_propose_tokens(context, MIN_N, MAX_N, 10**6, K)
        return [int(token) for token in found]

    return lambda load: _runs(load, propose)
