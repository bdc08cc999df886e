"""What lab 00-03 pins: the sampling pipeline, its order, its edges and its randomness."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.parts import load
from mini_vllm import EngineParts, LLMEngine, Sampler, SamplingParams

FOUR = np.log([0.5, 0.3, 0.15, 0.05])  # probabilities of four tokens, as logits
STEEP = np.log([0.4, 0.3, 0.2, 0.1])


def survivors(masked: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(masked)).tolist()


def drawn(lab, logits: np.ndarray, seeds: int = 300, **knobs) -> list[int]:
    """Every token that some seed draws, sorted."""
    return sorted({lab.sample(logits, seed=seed, **knobs) for seed in range(seeds)})


def test_softmax_is_a_distribution_and_is_stable(lab):
    got = lab.softmax(np.array([1000.0, 1001.0, 1002.0]))
    np.testing.assert_allclose(
        got,
        [0.09003057, 0.24472847, 0.66524096],
        atol=1e-8,
        err_msg="softmax depends on differences only: logits around 1000 give the same as 0, 1, 2. "
        "inf or nan here means the maximum was not subtracted before exp",
    )
    for logits in ([0.0], [-3.0, 5.0, 0.0], [2.0, -np.inf, 2.0]):
        got = lab.softmax(np.array(logits))
        assert abs(got.sum() - 1.0) < 1e-12 and (got >= 0).all(), (
            f"softmax({logits}) must be probabilities that sum to 1; you have {got}"
        )
    got = lab.softmax(np.array([2.0, -np.inf, 2.0]))
    assert got.tolist() == [0.5, 0.0, 0.5], (
        f"a logit of -inf means never: its probability is exactly 0; you have {got}"
    )
    for logits, expected in (([0.0, 0.0, 3000.0], [0, 0, 1]), ([0.0, -np.inf, -3000.0], [1, 0, 0])):
        got = lab.softmax(np.array(logits))
        assert got.tolist() == expected, (
            f"softmax({logits}): the largest exponent must be 0, so subtract the maximum; another "
            f"middle overflows here. Expected {expected}, you have {got}"
        )
    got = lab.softmax(np.array([0.1, 0.2], dtype=np.float32))
    assert got.dtype == np.float64, (
        f"work in float64 whatever comes in, or masses near p fall on the wrong side; {got.dtype}"
    )


def test_top_k_keeps_exactly_k(lab):
    logits = np.array([1.0, 5.0, 3.0, 4.0, 2.0])
    for k, expected in ((1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (4, [1, 2, 3, 4])):
        got = lab.apply_top_k(logits, k)
        assert survivors(got) == expected, (
            f"top-{k} of {logits.tolist()} keeps the tokens {expected}; you keep {survivors(got)}"
        )
        assert (got[expected] == logits[expected]).all(), (
            f"survivors keep their logits unchanged: {logits[expected]}, not {got[expected]}"
        )
        assert (np.delete(got, expected) == -np.inf).all(), (
            f"the others become -inf, not {np.delete(got, expected)}: exp(0) is 1, so a masked "
            "logit of 0 would still be drawn"
        )
    for off in (0, -1, 5, 99):
        got = lab.apply_top_k(logits, off)
        assert got.tolist() == logits.tolist(), f"k={off} switches top-k off; you have {got}"
    got = survivors(lab.apply_top_k(np.array([1.0, 1.0 + 1e-9, 0.0]), 1))
    assert got == [1], f"1 + 1e-9 is more than 1 in float64, so k=1 keeps token 1; you keep {got}"
    for name, k in (("apply_top_k", 1), ("apply_top_k", 0), ("apply_top_p", 0.5)):
        got = getattr(lab, name)(np.array([0.1, 0.2], dtype=np.float32), k)
        assert got.dtype == np.float64, f"{name} returns float64 whatever comes in; {got.dtype}"


def test_top_k_ties_survive(lab):
    got = survivors(lab.apply_top_k(np.array([1.0, 3.0, 2.0, 2.0, 0.0]), 2))
    assert got == [1, 2, 3], (
        "tokens 2 and 3 tie for second place: the engine masks only what is strictly below the "
        f"k-th value, so both stay; you keep {got}"
    )


def test_top_p_keeps_the_smallest_sufficient_nucleus(lab):
    for p, expected in ((0.4, 1), (0.75, 2), (0.9, 3), (0.96, 4), (1e-9, 1)):
        got = survivors(lab.apply_top_p(FOUR, p))
        assert got == list(range(expected)), (
            f"probabilities 0.5, 0.3, 0.15, 0.05 and p={p}: keep tokens until their mass reaches p,"
            f" the crossing one included: {list(range(expected))}; you keep {got}"
        )
    for order in ([3, 0, 2, 1], [1, 3, 0, 2]):
        got = lab.apply_top_p(FOUR[order], 0.75)
        expected = sorted(order.index(token) for token in (0, 1))
        assert survivors(got) == expected, (
            f"the same tokens in the order {order}: the two likeliest stand at {expected}, and "
            f"they must stay at their own positions; you keep {survivors(got)}"
        )
    got = survivors(lab.apply_top_p(np.log([0.4, 0.4, 0.2]), 0.5))
    assert got == [0, 1], f"0.4 is less than 0.5, so a second token is needed; you keep {got}"
    for logits, p in ((FOUR, 1.0), (np.array([0.0, -50.0]), 1.0), (FOUR, 1.5)):
        got = lab.apply_top_p(logits, p).tolist()
        assert got == logits.tolist(), (
            f"p={p} is off and keeps everything, also a token whose probability is lost in the sum"
            f"\nexpected {logits.tolist()}\ncame     {got}"
        )
    got = survivors(lab.apply_top_p(np.log([0.5, 0.493, 0.007]), 0.991))
    assert got == [0, 1], (
        f"p=0.991 is not off: 0.5 + 0.493 reaches it, the third token goes; you keep {got}"
    )


def test_top_p_at_an_exact_boundary_and_on_ties(lab, record_property):
    got = survivors(lab.apply_top_p(np.zeros(2), 0.5))
    assert got == [0], (
        "probabilities 0.5 and 0.5, both exact, and p=0.5: the first reaches p alone, and a second "
        f"token would not be the smallest set; you keep {got}"
    )
    record_property("measured.half", len(got))
    for logits, p, expected in (
        (np.zeros(4), 0.5, [0, 1]),
        (np.array([1.0, 0.0, 1.0, 1.0]), 0.4, [0, 2]),
    ):
        got = survivors(lab.apply_top_p(logits, p))
        assert got == expected, (
            f"logits {logits.tolist()}, p={p}: of equally likely tokens the lower index counts as "
            f"the likelier, so {expected} stay; you keep {got}"
        )


def test_top_p_mass_is_enough_and_minimal(lab):
    rng = np.random.default_rng(7)
    for _ in range(200):
        logits = rng.normal(size=30) * 2
        p = float(rng.uniform(0.05, 0.99))
        kept = survivors(lab.apply_top_p(logits, p))
        probabilities = np.exp(logits) / np.exp(logits).sum()
        mass = probabilities[kept].sum()
        assert mass >= p - 1e-9, f"the kept tokens carry {mass:.4f}, less than p={p:.4f}"
        least = probabilities[kept].min()
        assert mass - least < p, (
            f"without its least likely token the set still carries {mass - least:.4f} >= p={p:.4f}:"
            " it is not the smallest set"
        )


def test_top_p_counts_only_what_top_k_left(lab):
    masked = np.array([np.log(0.4), np.log(0.3), -np.inf, -np.inf])
    got = survivors(lab.apply_top_p(masked, 0.55))
    assert got == [0], (
        "after top-k only 0.4 and 0.3 are left, which is 0.571 and 0.429 of what remains: the "
        f"first alone reaches 0.55; you keep {got}"
    )


def test_greedy_is_argmax_and_ignores_every_other_knob(lab, monkeypatch):
    logits = np.array([0.1, 2.0, -1.0, 1.9])

    def no_generator(*_args, **_kwargs):
        pytest.fail(
            "temperature 0 must not make a random generator: a greedy request would advance the "
            "stream of a seeded one",
            pytrace=False,
        )

    expected = 1
    monkeypatch.setattr(np.random, "default_rng", no_generator)
    for knobs in ({}, {"top_k": 1}, {"top_p": 0.01}, {"top_k": 3, "top_p": 0.5, "seed": 9}):
        got = lab.sample(logits, temperature=0, **knobs)
        assert got == expected, f"temperature 0 with {knobs}: argmax is {expected}, you have {got}"
        assert type(got) is int, f"return a Python int, not {type(got).__name__}"


def test_greedy_compares_in_float64(lab):
    got = lab.sample(np.array([1.0, 1.0 + 1e-9]), temperature=0)
    assert got == 1, f"1 + 1e-9 is more than 1, unless it is rounded to float32; you have {got}"


def test_a_small_temperature_still_draws(lab):
    logits = np.array([0.005, 0.0])
    hits = sum(lab.sample(logits, 0.005, seed=seed) == 0 for seed in range(1000))
    assert abs(hits / 1000 - 0.7311) < 0.06, (
        "logits 0.005 and 0 at temperature 0.005 are 1 and 0 after the division: token 0 has "
        f"probability 0.731, and over 1,000 seeds it came {hits / 1000:.3f} of the time. Only "
        "temperature 0 is greedy"
    )
    close = np.array([1.0000001, 1.0], dtype=np.float32)
    got = [lab.sample(close, 1e-7, seed=seed) for seed in range(300)]
    expected = [lab.sample(close.astype(np.float64), 1e-7, seed=seed) for seed in range(300)]
    assert got == expected, (
        "the same logits as float32 and as float64 must draw the same tokens: divide in float64. "
        f"They differ for {sum(a != b for a, b in zip(got, expected, strict=True))} of 300 seeds"
    )
    kind = type(got[0])
    assert kind is int, f"a drawn token is a Python int too, not {kind.__name__}"


def test_top_k_of_one_is_not_greedy_on_ties(lab):
    got = drawn(lab, np.array([0.0, 3.0, 3.0]), seeds=60, top_k=1)
    assert got == [1, 2], (
        "two logits tie for first place: both survive top_k=1, so both are drawn by some seed of "
        f"60; only temperature 0 takes the lowest index. You draw {got}"
    )


def test_argmax_tie_lowest_index(lab):
    got = lab.sample(np.array([0.0, 7.0, 7.0, 7.0]), temperature=0)
    assert got == 1, f"three logits tie; argmax takes the lowest index, 1; you have {got}"


def test_temperature_sharpens_or_flattens(lab):
    logits = np.array([2.0, 1.0, 0.0])
    for temperature, expected in ((0.5, 0.8668), (1.0, 0.6652), (2.0, 0.5065)):
        hits = sum(lab.sample(logits, temperature, seed=seed) == 0 for seed in range(2000))
        assert abs(hits / 2000 - expected) < 0.03, (
            f"at temperature {temperature} token 0 has probability {expected}; over 2,000 seeds "
            f"it came {hits / 2000:.3f} of the time. Dividing by T sharpens when T < 1"
        )


def test_pipeline_order_is_observable(lab, record_property):
    cases = [
        ({"top_k": 2, "top_p": 0.55}, [0], "top-k first leaves 0.571/0.429, and 0.571 reaches p"),
        ({"top_k": 3, "top_p": 0.75}, [0, 1], "top-k first leaves 0.444/0.333/0.222: two reach p"),
        ({"temperature": 0.5, "top_p": 0.75}, [0, 1], "at T=0.5 they are 0.533/0.3: two reach p"),
    ]
    for knobs, expected, why in cases:
        got = drawn(lab, STEEP, **knobs)
        assert got == expected, (
            f"probabilities 0.4/0.3/0.2/0.1 with {knobs}: {why}, so only {expected} can be drawn; "
            f"300 seeds drew {got}. The order is temperature, top-k, top-p, softmax, draw"
        )
        if knobs == cases[0][0]:
            record_property("measured.survivors", len(got))


def test_seeded_sampling_is_reproducible(lab):
    logits = np.zeros(257)
    first = [lab.sample(logits, seed=seed) for seed in range(40)]
    np.random.random(3)  # somebody else uses the shared generator
    second = [lab.sample(logits, seed=seed) for seed in range(40)]
    assert first == second, "the same seed and logits give the same token, whatever else runs"
    assert len(set(first)) > 20, (
        f"40 seeds over 257 equal tokens gave only {len(set(first))} different ones: is the seed "
        "used?"
    )
    unseeded = {lab.sample(logits) for _ in range(40)}
    assert len(unseeded) > 1, "seed=None must not repeat one draw for ever"
    np.random.seed(5)
    before = np.random.random()
    np.random.seed(5)
    lab.sample(logits, seed=1)
    assert np.random.random() == before, (
        "sampling must not touch numpy's global generator: other requests would change with it"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.5, 0.7, 1.0, 1.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (10, 0.9)])
def test_agrees_with_mini_vllm_sampler(lab, temperature, top_k, top_p):
    engine = Sampler()
    for case in range(4):
        logits = np.random.default_rng(case).normal(size=257) * 3
        for seed in (0, 1, 42):
            params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
            expected = engine.sample(logits, params)
            got = lab.sample(logits, temperature, top_k, top_p, seed)
            assert got == expected, (
                f"T={temperature}, top_k={top_k}, top_p={top_p}, seed={seed}: mini_vllm draws "
                f"token {expected}, you draw {got}. Same steps, same order, one draw from a fresh "
                "default_rng(seed)"
            )


def test_masks_of_the_real_sampler(lab):
    for case in load("sampling_masks"):
        if case["min_p"] > 0:
            continue  # min-p is not part of this lab
        logits = np.array(case["logits"])
        got = survivors(lab.apply_top_p(lab.apply_top_k(logits, case["top_k"]), case["top_p"]))
        assert got == case["kept"], (
            f"vLLM's own sampler was given {len(logits)} logits, top_k={case['top_k']} and "
            f"top_p={case['top_p']}. It kept the tokens\n{case['kept']}\nand you keep\n{got}"
        )


def test_inputs_not_mutated(lab):
    for call in (
        lambda a: lab.softmax(a),
        lambda a: lab.apply_top_k(a, 2),
        lambda a: lab.apply_top_k(a, 0),
        lambda a: lab.apply_top_p(a, 0.5),
        lambda a: lab.apply_top_p(a, 1.0),
        lambda a: lab.sample(a, 0.7, 2, 0.9, seed=3),
    ):
        logits = np.array([0.3, -1.0, 2.0, 0.7])
        kept = logits.copy()
        result = call(logits)
        assert logits.tolist() == kept.tolist(), (
            "the caller's logits changed: a second request, or a log-probability, would read the "
            f"masked ones. Came {logits.tolist()}"
        )
        if isinstance(result, np.ndarray):
            result[:] = 0.0
            assert logits.tolist() == kept.tolist(), (
                "the result is the caller's own array: return a copy even when nothing is masked"
            )


def test_validation(lab):
    logits = np.zeros(4)
    for knobs in (
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": -0.5},
        {"top_p": float("nan")},
        {"top_k": -2},
        {"temperature": 0.0, "top_p": 0.0},
    ):
        name = list(knobs)[-1]
        try:
            got = lab.sample(logits, **knobs)
        except ValueError as error:
            assert name in str(error), (
                f"{knobs} must be refused by a message that names {name}; it says: {error}"
            )
            assert str(knobs[name]) in str(error), (
                f"{knobs}: the message must hold the value {knobs[name]}; it says: {error}"
            )
            continue
        pytest.fail(f"{knobs} must raise ValueError; it returned {got!r}", pytrace=False)
    for knobs in ({"top_k": -1}, {"top_p": 1.0}, {"temperature": 0.0}):
        lab.sample(logits, seed=0, **knobs)


@pytest.mark.slow
def test_empirical_frequencies(lab):
    draws = 20_000
    counts = np.zeros(4)
    for seed in range(draws):
        counts[lab.sample(FOUR, seed=seed)] += 1
    expected = np.array([0.5, 0.3, 0.15, 0.05]) * draws
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 16.27, (
        f"20,000 seeds drew {counts.astype(int).tolist()} of an expected "
        f"{expected.astype(int).tolist()}: chi-square {chi2:.1f} with 3 degrees of freedom, above "
        "16.27, which chance exceeds once in a thousand"
    )


def test_the_engine_generates_with_your_sampler(lab):
    def generate(parts: EngineParts, **knobs) -> list[int]:
        engine = LLMEngine(model="toy", parts=parts)
        [result] = engine.generate(
            ["hello"], SamplingParams(max_tokens=12, ignore_eos=True, **knobs)
        )
        return result.outputs[0].token_ids

    mine = EngineParts(sampler=lab.Sampler)
    assert generate(mine) == generate(EngineParts()), (
        "greedy generation must give the same tokens with your sampler as with the engine's own"
    )
    knobs = {"temperature": 1.0, "top_k": 40, "seed": 7}
    first, second = generate(mine, **knobs), generate(mine, **knobs)
    assert first == second, f"the same request gave {first} and then {second}: the seed was lost"
    assert len(set(first)) > 3, f"12 random tokens out of 40 allowed, and they are {first}"
