"""Lab 08-01: a drafter that looks words up, a verifier, and the loop around them.

A *target* says the next token of a context; it stands for a model decoded greedily. A *run* is one
forward pass of it, and one run answers the question after the context and after each draft, as the
rows of its logits do. Names follow `vllm/v1/spec_decode/ngram_proposer.py:12` `NgramProposer` and
`vllm/v1/sample/rejection_sampler.py:708` `rejection_greedy_sample_kernel`. What holds throughout:

- V1: a run gives at least one token; what it gives is the accepted drafts and one token more.
- V2: the text is the target's own, whatever was drafted.
- V3: nobody's list of tokens is changed; every list that is returned is a new one.
"""

from __future__ import annotations

from collections.abc import Callable

Token = int
Target = Callable[[list[Token]], Token]
"""The next token after a context. The same context always gets the same answer."""


def run_baseline(context: list[Token], target: Target, num_tokens: int) -> list[Token]:
    """Plain decoding, one run per token (given)."""
    tokens: list[Token] = []
    for _ in range(num_tokens):
        tokens.append(target(context + tokens))
    return tokens


def ngram_propose(context: list[Token], n: int, k: int) -> list[Token]:
    """Guess from the context itself: what followed the last `n` tokens when they last stood there.

    Of all earlier places that hold the same `n` tokens the most recent counts; it may overlap the
    end of the context, and is not the end itself. A trace: in `[1, 2, 3, 4, 1, 2, 3]` with n = 2
    the last two are 2, 3; they stood at place 1; `[4, 1, 2]` followed, for k = 3.

    Args:
        context: tokens so far.
        n: length of what must match.
        k: most tokens to propose.

    Returns:
        The tokens behind the match, at most `k`, fewer where the context ends; `[]` where nothing
        matches, the context has at most `n` tokens, or `k` is 0 or less.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: must be at least 1")
    if k <= 0:
        return []
    suffix = context[-n:]
    for start in range(len(context) - n - 1, -1, -1):
        if context[start : start + n] == suffix:
            return context[start + n : start + n + k]
    return []


def verify_greedy(
    context: list[Token], proposed: list[Token], target: Target
) -> tuple[list[Token], int]:
    """One run of the target over the context and the drafts.

    A trace, with a target that goes 1, 2, 3, 4, 1, ... by position: after `[1, 2, 3, 4]` the drafts
    `[1, 2, 9, 4]` give `([1, 2, 3], 2)`: two accepted, and the target's own 3 in the place of 9.

    Args:
        context: tokens so far.
        proposed: drafts, any number of them, also none.
        target: asked at most once for each draft and once more.

    Returns:
        The tokens to append, and how many of them were drafts. The tokens are those that plain
        decoding would say next (V2): accepted drafts, then exactly one token of the target (V1).
    """
    tokens: list[Token] = []
    for draft in proposed:
        token = target(context + tokens)
        tokens.append(token)
        if token != draft:
            return tokens, len(tokens) - 1
    tokens.append(target(context + tokens))
    return tokens, len(proposed)


def run_speculative(
    context: list[Token], target: Target, n: int, k: int, num_tokens: int
) -> tuple[list[Token], dict[str, int]]:
    """Draft with `ngram_propose`, verify with `verify_greedy`, until there are tokens enough.

    Args:
        context: the prompt.
        target: the model.
        n, k: as in `ngram_propose`; k = 0 is plain decoding.
        num_tokens: at least so many; the last run may give up to `k` more, and they are kept.

    Returns:
        The new tokens, and `{"proposed": drafts offered, "accepted": drafts accepted, "runs":
        runs of the target}`; `len(tokens) == accepted + runs`. `num_tokens` of 0 or less gives
        `[]` and zeros.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: must be at least 1")
    tokens: list[Token] = []
    stats = {"proposed": 0, "accepted": 0, "runs": 0}
    while len(tokens) < num_tokens:
        known = context + tokens
        proposed = ngram_propose(known, n, k)
        new, accepted = verify_greedy(known, proposed, target)
        tokens += new
        stats["proposed"] += len(proposed)
        stats["accepted"] += accepted
        stats["runs"] += 1
    return tokens, stats


def ngram_propose_upstream(context: list[Token], min_n: int, max_n: int, k: int) -> list[Token]:
    """Guess as vLLM does: the longest match, and of equally long ones the earliest.

    A match is an earlier place, overlap allowed, that holds the last m tokens of the context, with
    `min_n <= m <= max_n`. The largest m that has one counts; its first place counts. A trace: in
    `[1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3]`, sizes 2 to 3, k = 2: the three tokens 1, 2, 3 stood at
    places 0 and 4; `[100, 1]`.

    It runs before every step of every request, so its cost must not depend on the sizes: at most
    three comparisons of tokens per token of the context.

    Returns:
        The tokens behind the match, at most `k`; `[]` without a match, or if `k` is 0 or less.

    Raises:
        ValueError: `min_n` is below 1 or above `max_n`.
    """
    if not 1 <= min_n <= max_n:
        raise ValueError(f"min_n={min_n}, max_n={max_n}: need 1 <= min_n <= max_n")
    if k <= 0:
        return []
    reverse = context[::-1]
    # common[i]: how many tokens of `reverse` from i on are those from 0 on, at most max_n
    common = [0] * len(reverse)
    best = where = left = right = 0  # reverse[left:right] repeats the beginning
    for i in range(1, len(reverse)):
        size = min(common[i - left], right - i) if i < right else 0
        while size < max_n and i + size < len(reverse) and reverse[i + size] == reverse[size]:
            size += 1
        common[i] = size
        if i + size > right:
            left, right = i, i + size
        if size >= max(best, min_n):  # later in `reverse` is earlier in the context
            best, where = size, i
    return context[len(context) - where :][:k] if best else []
