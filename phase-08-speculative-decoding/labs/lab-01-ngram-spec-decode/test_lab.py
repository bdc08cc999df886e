"""What lab 08-01 pins: where drafts come from, what a run keeps, and that no text changes."""

from __future__ import annotations

import hashlib
import random

import pytest

from conformance import parts
from labkit import refused, same

PERIOD = [1, 2, 3, 4]


def periodic(context):
    """1, 2, 3, 4, 1, ... by position."""
    return PERIOD[len(context) % 4]


def novel(context):
    """Never says a token twice."""
    return 1000 + len(context)


def noise(context):
    """One of four tokens, from everything before it."""
    return hashlib.sha256(repr(context).encode()).digest()[0] % 4


def adversary(lab):
    """A target that looks up what a drafter of n = 2 would say, and says something else."""

    def target(context):
        guess = lab.ngram_propose(context, 2, 1)
        return (guess[0] + 1) % 5 if guess else len(context) % 5

    return target


class Asked:
    """A target that notes what it was asked."""

    def __init__(self, target):
        self.target, self.contexts = target, []

    def __call__(self, context):
        if len(self.contexts) >= 5000:
            raise AssertionError("the target was asked 5,000 times: this loop does not end")
        self.contexts.append(list(context))
        return self.target(context)


class Compared(int):
    """A token that counts how often tokens were compared, or hashed to be looked up."""

    count = 0

    def __hash__(self):
        Compared.count += 1
        return hash(int(self))

    def __eq__(self, other):
        Compared.count += 1
        return int(self) == int(other)

    def __ne__(self, other):
        return not self == other


# --- the drafter ----------------------------------------------------------------------------------


def test_propose_continues_a_repetition(lab):
    same(
        lab.ngram_propose([1, 2, 3, 4, 1, 2, 3], 2, 3),
        [4, 1, 2],
        "ngram_propose([1, 2, 3, 4, 1, 2, 3], n=2, k=3): 2, 3 stood at place 1; what followed",
    )


def test_propose_uses_most_recent_earlier_match(lab):
    context = [1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3]
    same(
        lab.ngram_propose(context, 3, 2),
        [300, 1],
        "1, 2, 3 stood at places 0, 4 and 8: the most recent place counts, since a text goes on as "
        "it lately did",
    )


def test_propose_never_matches_its_own_suffix(lab):
    same(
        lab.ngram_propose([7, 7, 7, 7], 2, 3),
        [7],
        "ngram_propose([7, 7, 7, 7], n=2, k=3): the last two tokens are no earlier place, but "
        "places 1 and 2 are, which overlap them; one token follows",
    )
    same(lab.ngram_propose([5, 6, 5], 1, 2), [6, 5], "the last 5 matches the first, not itself")
    same(lab.ngram_propose([5, 6, 7], 1, 2), [], "7 stands nowhere else: no match, not its own end")


def test_propose_at_most_k_and_short_tail(lab):
    context = [1, 2, 3, 4, 5, 6, 1, 2]
    for k in range(1, 5):
        same(lab.ngram_propose(context, 2, k), [3, 4, 5, 6][:k], f"at most k={k} tokens")
    same(
        lab.ngram_propose([1, 2, 9, 1, 2], 2, 10),
        [9, 1, 2],
        "the context ends behind the match: fewer than k, and nothing invented",
    )


def test_propose_no_match_or_short_context(lab):
    for context, n, k, why in (
        ([1, 4, 3, 4], 2, 4, "3, 4 stands nowhere before, though 4 does"),
        ([1, 2], 2, 4, "a context of n tokens has no earlier place"),
        ([], 1, 4, "an empty context"),
        ([1, 1], 3, 4, "a context shorter than n"),
        ([1, 2, 1, 2], 2, 0, "k = 0"),
        ([1, 5, 6, 1], 1, -2, "k below 0"),
    ):
        same(lab.ngram_propose(context, n, k), [], f"{why}: nothing is proposed")


@pytest.mark.parametrize("n", [0, -2])
def test_n_below_one_raises(lab, n):
    refused(lambda: lab.ngram_propose([1, 2, 3], n, 2), f"ngram_propose with n={n}")
    refused(lambda: lab.ngram_propose([1, 2, 3], n, 0), f"ngram_propose with n={n} and k=0")
    refused(lambda: lab.run_speculative([1], periodic, n, 2, 3), f"run_speculative with n={n}")
    refused(lambda: lab.run_speculative([1], periodic, n, 2, 0), f"run_speculative with n={n}")


# --- the verifier ---------------------------------------------------------------------------------


def test_verify_stops_at_first_mismatch(lab):
    same(
        lab.verify_greedy([1, 2, 3, 4], [1, 2, 9, 4], periodic),
        ([1, 2, 3], 2),
        "drafts 1, 2, 9, 4 where the target says 1, 2, 3: two accepted, its own 3 in the place of "
        "9, and the 4 behind it was guessed after a 9 that was never said",
    )
    same(
        lab.verify_greedy([1, 2, 3, 4], [5, 2, 3], periodic),
        ([1], 0),
        "the first draft is wrong: the target's own token and nothing else, however good the rest",
    )


def test_verify_uses_evolving_context(lab):
    same(
        lab.verify_greedy([1, 2, 3, 4], [1, 2, 3], periodic),
        ([1, 2, 3, 4], 3),
        "each draft is judged after those before it: 1, then 2 after 1, then 3 after 1, 2",
    )

    def parrot(context):  # one more than the last token
        return context[-1] + 1

    same(
        lab.verify_greedy([8], [9, 10, 10], parrot), ([9, 10, 11], 2), "the same, by the last token"
    )


def test_bonus_token_on_full_acceptance(lab):
    tokens, accepted = lab.verify_greedy([1, 2, 3, 4], [1, 2], periodic)
    same(
        (tokens, accepted),
        ([1, 2, 3], 2),
        "both drafts are right: the row behind the last one has an answer too, and it was paid for",
    )


def test_empty_proposal_still_progresses(lab):
    same(
        lab.verify_greedy([1, 2, 3, 4], [], periodic),
        ([1], 0),
        "no drafts: a run is plain decoding, one token (V1). Without it the loop never ends",
    )


def test_a_run_asks_one_question_per_draft_and_one_more(lab):
    for proposed, at_most in (([], 1), ([1, 2, 3, 4, 1], 6), ([9] * 8, 9)):
        target = Asked(periodic)
        lab.verify_greedy([1, 2, 3, 4], list(proposed), target)
        count = len(target.contexts)
        assert 1 <= count <= at_most, (
            f"a run of the target over {len(proposed)} drafts has {at_most} rows, so the target "
            "may be asked so often at most: more would be further forward passes\n"
            f"expected 1 to {at_most}\ncame     {count}"
        )


# --- the loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["periodic", "novel", "adversary", "noise"])
def test_output_identical_to_baseline(lab, name):
    target = {"periodic": periodic, "novel": novel, "noise": noise}.get(name) or adversary(lab)
    for n, k in ((1, 1), (1, 5), (2, 3), (2, 8), (4, 4)):
        context = [0, 1, 2, 3, 0, 1, 2, 3]
        tokens, _ = lab.run_speculative(list(context), Asked(target), n, k, 40)
        expected = lab.run_baseline(context, target, len(tokens))
        same(tokens, expected, f"target {name}, n={n}, k={k}: the target's own text (V2)")
        assert 40 <= len(tokens) <= 40 + k, (
            f"n={n}, k={k}: at least the 40 tokens asked for, at most k more\n"
            f"expected 40 to {40 + k}\ncame     {len(tokens)}"
        )


def test_periodic_text_needs_far_fewer_runs(lab, record_property):
    tokens, stats = lab.run_speculative(PERIOD * 2, Asked(periodic), 2, 8, 24)
    same(
        (stats, len(tokens)),
        ({"proposed": 20, "accepted": 20, "runs": 5}, 25),
        "1, 2, 3, 4 for ever, n=2, k=8, at least 24 tokens: each run keeps 4 drafts and adds one",
    )
    record_property("measured.runs", stats["runs"])


def test_k_plateau_is_the_period(lab):
    counts = []
    for k in (0, 1, 2, 3, 4, 5, 6, 8):
        tokens, stats = lab.run_speculative(PERIOD * 2, Asked(periodic), 2, k, 24)
        counts.append((stats["runs"], len(tokens)))
    same(
        counts,
        [(24, 24), (12, 24), (8, 24), (6, 24), (5, 25), (5, 25), (5, 25), (5, 25)],
        "(runs, tokens) for k = 0, 1, 2, 3, 4, 5, 6, 8: behind the most recent match stand as many "
        "tokens as the period is long, so more than 4 drafts never come",
    )


def test_unguessable_text_costs_one_run_per_token(lab, record_property):
    _, stats = lab.run_speculative(PERIOD * 2, Asked(novel), 2, 4, 20)
    same(
        stats,
        {"proposed": 4, "accepted": 0, "runs": 20},
        "a target that says nothing twice: drafts only while the prompt's end repeats",
    )
    _, stats = lab.run_speculative([0, 1, 0, 1], Asked(adversary(lab)), 2, 4, 20)
    same(
        stats,
        {"proposed": 26, "accepted": 0, "runs": 20},
        "a target that contradicts the drafter: every draft is computed for nothing",
    )
    tokens, stats = lab.run_speculative([0, 1, 2, 3], Asked(noise), 2, 4, 400)
    record_property("measured.noise", len(tokens) / stats["runs"])
    assert stats["runs"] <= len(tokens), "V1: a run gives at least one token"


def test_stats_identity(lab):
    for target in (periodic, novel, noise):
        for n, k, num_tokens in ((1, 3, 30), (2, 6, 17), (3, 2, 25)):
            asked = Asked(target)
            tokens, stats = lab.run_speculative([0, 1, 2, 3, 0, 1], asked, n, k, num_tokens)
            where = f"{target.__name__}, n={n}, k={k}: {stats}"
            same(set(stats), {"proposed", "accepted", "runs"}, "the names of the counters")
            same(
                len(tokens), stats["accepted"] + stats["runs"], f"tokens = accepted + runs; {where}"
            )
            assert 0 <= stats["accepted"] <= stats["proposed"] <= k * stats["runs"], (
                f"0 <= accepted <= proposed <= k * runs\ncame     {where}"
            )
            rows = stats["proposed"] + stats["runs"]
            assert len(asked.contexts) <= rows, (
                f"the runs have {rows} rows together, a draft or a last one each\n"
                f"expected at most {rows} questions\ncame     {len(asked.contexts)}"
            )
    for none in (0, -3):
        same(
            lab.run_speculative([1, 2], Asked(periodic), 1, 2, none),
            ([], {"proposed": 0, "accepted": 0, "runs": 0}),
            f"num_tokens={none}: nothing is run",
        )


def test_inputs_not_mutated(lab):
    context, proposed = [1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 9]
    got = lab.ngram_propose(context, 2, 3)
    got.append(99)
    lab.ngram_propose_upstream(context, 1, 3, 2).append(99)
    tokens, _ = lab.verify_greedy(context, proposed, periodic)
    tokens.append(99)
    empty: list[int] = []
    tokens, _ = lab.verify_greedy(context, empty, periodic)
    tokens.append(99)
    same(empty, [], "an empty list of drafts stays empty (V3)")
    lab.run_speculative(context, periodic, 2, 3, 6)
    same(context, PERIOD * 2, "the context belongs to the caller (V3)")
    same(proposed, [1, 2, 9], "the drafts belong to the caller (V3)")


# --- vLLM's policy --------------------------------------------------------------------------------


def test_upstream_takes_the_longest_then_the_earliest(lab):
    context = [1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3]
    for arguments, expected, why in (
        ((context, 2, 3, 2), [100, 1], "three tokens match at places 0 and 4: the earliest"),
        ((context, 1, 2, 2), [100, 1], "at most two: 2, 3 at places 1 and 5, the earliest"),
        (([9, 5, 1, 7, 4, 5, 2, 4, 5], 1, 2, 2), [2, 4], "4, 5 at place 4 beats 5 at place 1"),
        (([1, 2, 8, 3, 2, 6, 9, 2], 1, 5, 1), [8], "one token matches: its earliest place"),
        (([7, 7, 7, 7], 2, 2, 3), [7, 7], "an earliest match leaves more behind it: places 0, 1"),
        (([7, 7, 7, 7], 2, 3, 3), [7], "but the longest comes first: places 0 to 2"),
        (([1, 2, 3, 1], 2, 3, 3), [], "only one token matches, two are the least"),
        (([1, 2], 3, 5, 3), [], "a context shorter than min_n"),
        (([], 1, 5, 3), [], "an empty context"),
        (([1, 2, 1, 2], 1, 2, 0), [], "k = 0"),
    ):
        same(
            lab.ngram_propose_upstream(*arguments),
            expected,
            f"ngram_propose_upstream{arguments}: {why}",
        )


@pytest.mark.parametrize("sizes", [(0, 3), (-1, 1), (3, 2)])
def test_upstream_sizes_are_checked(lab, sizes):
    refused(lambda: lab.ngram_propose_upstream([1, 2, 1], *sizes, 2), f"min_n, max_n = {sizes}")


def test_upstream_agrees_with_the_real_proposer(lab):
    for case in parts.load("ngram_proposer"):
        sizes, k = (case["min_n"], case["max_n"]), case["k"]
        for context, drafts in zip(case["contexts"], case["drafts"], strict=True):
            room = min(k, case["max_model_len"] - len(context))  # what the caller leaves
            got = lab.ngram_propose_upstream(list(context), *sizes, room)
            same(
                got,
                drafts,
                f"recorded from vLLM's NgramProposer: sizes {sizes}, k={room}, context {context}",
            )


def test_upstream_cost_does_not_depend_on_the_sizes(lab):
    draw = random.Random(8)
    contexts = {
        "noise": ([draw.randrange(3) for _ in range(600)], None),
        "one token throughout, another at the end": ([0] * 599 + [1], []),
        "one token throughout": ([0] * 600, [0, 0, 0, 0]),
        "nearly periodic": ([0, 0, 0, 1] * 149 + [0, 0, 0, 2], []),
    }
    for words, (tokens, expected) in contexts.items():
        Compared.count = 0
        got = lab.ngram_propose_upstream([Compared(token) for token in tokens], 1, 300, 4)
        counted = Compared.count
        if expected is not None:
            same(got, expected, f"600 tokens, {words}, sizes 1 to 300, k = 4")
        assert counted <= 3 * len(tokens), (
            f"600 tokens, {words}, sizes 1 to 300: it runs on the processor before every step of "
            "every request, so it looks at each token a few times, whatever the sizes\n"
            f"expected at most {3 * len(tokens):,} comparisons\ncame     {counted:,}"
        )
