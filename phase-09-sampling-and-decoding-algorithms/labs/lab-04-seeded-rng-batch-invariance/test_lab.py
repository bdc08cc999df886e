"""What lab 09-04 pins: whose randomness it is, shown against a design that gets it wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest

from labkit import refused, same, shipped_model
from mini_vllm import EngineParts, LLMEngine, Sampler, SamplingParams

SIZE = 1000
FLAT = np.zeros(SIZE)
UNIFORM = np.full(SIZE, 1 / SIZE)
SKEWED = np.log([0.5, 0.3, 0.15, 0.05])


def reference(seed, count, law=UNIFORM):
    """`count` tokens of a generator nobody else has."""
    rng = np.random.default_rng(seed)
    return [int(rng.choice(len(law), p=law)) for _ in range(count)]


def tokens(sampler, request_id, count, seed=None, logits=FLAT):
    return [sampler.sample(request_id, logits, 1.0, seed) for _ in range(count)]


class SharedRngSampler:
    """The natural design, and the wrong one: one generator for the whole batch."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def sample(self, request_id, logits, temperature=1.0, seed=None):
        return int(self.rng.choice(len(logits), p=UNIFORM))


# --- one request ----------------------------------------------------------------------------------


def test_same_seed_reproduces_across_instances(lab):
    first = tokens(lab.PerRequestSampler(), "a", 6, seed=7)
    again = tokens(lab.PerRequestSampler(), "a", 6, seed=7)
    same(again, first, "seed 7 in two samplers: the same tokens")
    same(first, reference(7, 6), "they are those of np.random.default_rng(7), one choice a token")
    assert type(first[0]) is int, f"a Python int\nexpected int\ncame     {type(first[0]).__name__}"


def test_different_seeds_diverge(lab):
    sampler = lab.PerRequestSampler()
    streams = {tuple(tokens(sampler, f"r{seed}", 4, seed)) for seed in range(20)}
    same(len(streams), 20, "20 seeds, uniform logits over 1,000 ids: 20 different texts")
    unseeded = {tuple(tokens(lab.PerRequestSampler(), "a", 4)) for _ in range(5)}
    same(len(unseeded), 5, "no seed, five samplers: the operating system decides each anew")


def test_request_stream_is_stateful_not_reset(lab, record_property):
    sampler = lab.PerRequestSampler()
    got = tokens(sampler, "a", 6, seed=7)
    record_property("measured.distinct", len(set(got)))
    same(
        got,
        reference(7, 6),
        "six tokens of one request: its generator goes on. One that is made anew at each step says "
        "one token for ever; on peaked logits nobody notices",
    )
    same(
        [sampler.sample("a", FLAT, 1.0, seed) for seed in (7, 8, None)],
        reference(7, 9)[6:],
        "seeds that come later are ignored: the stream goes on",
    )


def test_logits_and_temperature_shape_the_draw(lab):
    sampler, rng = lab.PerRequestSampler(), np.random.default_rng(3)
    expected = []
    for temperature in (0.5, 1.0, 2.0, 0.25) * 5:
        weights = np.exp(SKEWED / temperature)
        expected.append(int(rng.choice(4, p=weights / weights.sum())))
    logits = SKEWED.astype(np.float64)
    got = [sampler.sample("a", logits, T, 3) for T in (0.5, 1.0, 2.0, 0.25) * 5]
    same(got, expected, "softmax(logits / temperature), another temperature at every call")
    same(logits.tolist(), SKEWED.tolist(), "the logits belong to the caller")
    banned = np.array([0.0, -np.inf, 0.0])
    assert 1 not in tokens(sampler, "b", 200, 1, banned), "a token at -inf is never drawn"


def test_greedy_ignores_seed_and_rng_state(lab):
    sampler = lab.PerRequestSampler()
    row = np.array([1.0, 3.0, 2.0, 3.0])
    for seed in (None, 1, 2):
        same(sampler.sample("g", row, 0.0, seed), 1, f"greedy, seed {seed}: the lowest of equals")
    same(sampler.active_ids(), set(), "a greedy request has no generator (G2)")
    expected = reference(5, 4)
    got = []
    for _ in range(4):
        got.append(sampler.sample("a", FLAT, 1.0, 5))
        sampler.sample("a", row, 0.0, 5)
    same(got, expected, "greedy tokens in between do not move the request's generator (G2)")


def test_a_refused_call_leaves_nothing(lab):
    sampler = lab.PerRequestSampler()
    for temperature in (-0.1, float("nan")):
        refused(lambda T=temperature: sampler.sample("a", FLAT, T, 3), f"temperature {temperature}")
        refused(lambda T=temperature: lab.keyed_sample(FLAT, T, 3, 0), f"keyed, T {temperature}")
    same(sampler.active_ids(), set(), "a refused call has begun nothing")
    same(tokens(sampler, "a", 3, 9), reference(9, 3), "and fixed no seed")


# --- in company -----------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbours", [0, 1, 5])
def test_batch_invariance(lab, neighbours):
    sampler = lab.PerRequestSampler()
    got = []
    for _ in range(6):
        for other in range(neighbours):
            sampler.sample(f"n{other}", FLAT, 1.0, other if other % 2 else None)
        got.append(sampler.sample("a", FLAT, 1.0, 7))
    same(got, reference(7, 6), f"{neighbours} requests draw before it in every step (G1)")


def test_shared_rng_breaks_batch_invariance(lab, record_property):
    def said(sampler, neighbours):
        found = []
        for _ in range(3):
            for other in range(neighbours):
                sampler.sample(f"n{other}", FLAT, 1.0, 100 + other)
            found.append(sampler.sample("a", FLAT, 1.0, 7))
        return tuple(found)

    shared = {neighbours: said(SharedRngSampler(7), neighbours) for neighbours in (0, 1, 5)}
    record_property("measured.shared", shared[1][0])
    assert len(set(shared.values())) == 3, (
        "the control: one generator for all gives three texts for one seed\nexpected 3 texts\n"
        f"came     {shared}"
    )
    own = {said(lab.PerRequestSampler(), neighbours) for neighbours in (0, 1, 5)}
    same(own, {tuple(reference(7, 3))}, "yours gives one text, whoever else is in the batch (G1)")


def test_greedy_neighbours_change_nothing(lab):
    sampler = lab.PerRequestSampler()
    got = []
    for _ in range(4):
        sampler.sample("g", SKEWED, 0.0, 7)
        got.append(sampler.sample("a", FLAT, 1.0, 7))
        sampler.sample("h", SKEWED, 0.0)
    same(got, reference(7, 4), "greedy rows on both sides of it")


def test_any_interleaving_gives_the_same_texts(lab):
    draw = random.Random(1)
    for _ in range(20):
        sampler = lab.PerRequestSampler()
        texts = {f"r{index}": [] for index in range(6)}
        turns = [name for name in texts for _ in range(5)]
        draw.shuffle(turns)
        for name in turns:  # some pause for long, as after a preemption
            texts[name].append(sampler.sample(name, FLAT, 1.0, int(name[1:])))
        for name, text in texts.items():
            same(
                text,
                reference(int(name[1:]), 5),
                f"request {name} of six, five tokens each, in the order {' '.join(turns)} (G1)",
            )


def test_hundreds_of_live_requests(lab):
    sampler, names = lab.PerRequestSampler(), [f"r{index}" for index in range(300)]
    texts = [[sampler.sample(name, SKEWED, 1.0, 5) for name in names] for _ in range(8)]
    weights = np.exp(SKEWED)
    expected = reference(5, 8, weights / weights.sum())
    for index, text in enumerate(zip(*texts, strict=True)):
        same(list(text), expected, f"request {index} of 300 that are live at once, 8 tokens each")
    same(len(sampler.active_ids()), 300, "none has finished (G4)")


def test_equal_seeds_under_two_ids(lab):
    sampler = lab.PerRequestSampler()
    both = [(sampler.sample("a", FLAT, 1.0, 7), sampler.sample("b", FLAT, 1.0, 7)) for _ in "123"]
    same(both, [(t, t) for t in reference(7, 3)], "two requests with seed 7: two equal streams")


def test_nobody_elses_generator_moves(lab):
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()
    random.seed(1)
    state = random.getstate()
    tokens(lab.PerRequestSampler(), "a", 3, 7)
    lab.keyed_sample(FLAT, 1.0, 3, 4)
    same(np.random.get_state()[1].tolist() == before, True, "numpy's global generator is untouched")
    same(random.getstate() == state, True, "and so is Python's")


# --- the end --------------------------------------------------------------------------------------


def test_finish_frees_and_recycled_id_restarts(lab):
    sampler = lab.PerRequestSampler()
    tokens(sampler, "a", 2, 7)
    tokens(sampler, "b", 2, 8)
    same(sampler.active_ids(), {"a", "b"}, "two requests have drawn")
    sampler.active_ids().clear()
    sampler.finish("a")
    same(sampler.active_ids(), {"b"}, "finish forgets one, and the set was the caller's own")
    for unknown in ("a", "never seen"):
        sampler.finish(unknown)
    same(tokens(sampler, "a", 3, 9), reference(9, 3), "the id again, another seed: a new request")
    same(tokens(sampler, "b", 2, 8), reference(8, 4)[2:], "the neighbour's stream has gone on")


def test_nothing_is_left_of_a_thousand_requests(lab):
    sampler = lab.PerRequestSampler()
    for number in range(1000):
        sampler.sample(f"r{number}", SKEWED, 1.0, number)
        sampler.sample(f"r{number}", SKEWED, 0.0, number)
        sampler.finish(f"r{number}")
    same(sampler.active_ids(), set(), "all have finished")
    kept = {
        name: len(value)
        for name, value in getattr(sampler, "__dict__", {}).items()
        if hasattr(value, "__len__") and len(value)
    }
    same(kept, {}, "what the sampler holds after 1,000 finished requests (a server sees millions)")


# --- the engine -----------------------------------------------------------------------------------


def test_the_engine_draws_as_you_do(lab):
    asked = []

    class Probe(Sampler):
        """The engine's sampler, and what it was asked."""

        def sample(self, logits, params, rng=None):
            token = super().sample(logits, params, rng)
            asked.append((params, np.array(logits), token))
            return token

    engine = LLMEngine(shipped_model(), parts=EngineParts(sampler=Probe), max_num_seqs=2)
    wishes = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=length, ignore_eos=True)
        for seed, length in ((5, 4), (6, 9), (7, 7))
    ]
    engine.generate(["The KV cache", "A block", "def f(x):"], wishes)
    sampler = lab.PerRequestSampler()
    for params, logits, token in asked:
        got = sampler.sample(f"seed {params.seed}", logits, params.temperature, params.seed)
        same(got, token, f"the engine's token of the request with seed {params.seed}, two slots")
    same(len(asked), 20, "4 + 9 + 7 rows were asked for")


# --- part B ---------------------------------------------------------------------------------------


class Counting(np.random.Generator):
    """A generator that counts the numbers it gives."""

    drawn = 0

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found) or name == "bit_generator":
            return found

        def counted(*arguments, **options):
            result = found(*arguments, **options)
            Counting.drawn += np.size(result)
            return result

        return counted


def test_any_position_can_be_replayed_alone(lab):
    forward = [lab.keyed_sample(FLAT, 1.0, 7, position) for position in range(12)]
    order = random.Random(2).sample(range(12), 12)
    again = {position: lab.keyed_sample(FLAT, 1.0, 7, position) for position in order}
    same([again[position] for position in range(12)], forward, f"positions in the order {order}")
    assert len(set(forward)) > 8, f"12 positions of 1,000 ids: as good as all differ; {forward}"
    assert type(forward[0]) is int, f"a Python int; came {type(forward[0]).__name__}"


def test_noise_belongs_to_seed_and_position(lab):
    pairs = [(seed, position) for seed in range(6) for position in range(6)]
    found = [lab.keyed_sample(FLAT, 1.0, *pair) for pair in pairs]
    assert len(set(found)) >= 30, (
        "36 pairs of seed and position, 1,000 ids: about 35 different tokens. Fewer, and pairs "
        "share their noise, as with seed + position\nexpected 30 or more\n"
        f"came     {len(set(found))}"
    )
    big = 2**63 + 5
    assert lab.keyed_sample(FLAT, 1.0, big, 0) != lab.keyed_sample(FLAT, 1.0, big, 1), (
        "a large seed is as good as any"
    )


def test_keyed_frequencies_are_the_law(lab):
    draws = 4_000
    for temperature in (1.0, 0.5):
        weights = np.exp(SKEWED / temperature)
        expected = draws * weights / weights.sum()
        said = [lab.keyed_sample(SKEWED, temperature, 11, position) for position in range(draws)]
        counts = np.bincount(said, minlength=4)
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        limit = 3 + 10 * 6**0.5
        assert chi2 < limit, (
            f"chi-squared of {draws:,} positions against softmax(logits / {temperature})\n"
            f"expected below {limit:.1f}\ncame     {chi2:.1f}, counts {counts.tolist()}"
        )


def test_keyed_greedy_is_the_argmax(lab):
    for position in range(5):
        same(lab.keyed_sample(np.array([1.0, 3.0, 3.0]), 0.0, 7, position), 1, "no noise at T = 0")


def test_a_far_position_costs_what_the_first_does(lab, monkeypatch):
    monkeypatch.setattr(np.random, "Generator", Counting)
    monkeypatch.setattr(np.random, "default_rng", lambda seed=None: Counting(np.random.PCG64(seed)))
    for position in (0, 3_000):
        Counting.drawn = 0
        lab.keyed_sample(SKEWED, 1.0, 7, position)
        assert 1 <= Counting.drawn <= 16, (
            f"random numbers drawn for position {position}, 4 ids: a request that is preempted at "
            f"token 3,000 must not draw 3,000 tokens again\nexpected 1 to 16\ncame     "
            f"{Counting.drawn}"
        )
