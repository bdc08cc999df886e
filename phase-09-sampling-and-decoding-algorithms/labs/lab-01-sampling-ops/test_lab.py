"""What lab 09-01 pins: every stage, and the place of each in the order."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from conformance import parts
from conformance.features.sampling.sampler import read, tolerance
from labkit import refused, same, shipped_model
from mini_vllm import EngineParts, LLMEngine, SamplingParams

PEAKED = np.log([0.5, 0.2, 0.15, 0.1, 0.05])
FLAT = np.log([0.22, 0.21, 0.2, 0.19, 0.18])


@dataclass(frozen=True)
class Wish:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None


PLAIN = Wish()
GREEDY = Wish(temperature=0.0)


def kept(row) -> list[int]:
    """Ids that are not at -inf."""
    return np.flatnonzero(np.asarray(row) > -np.inf).tolist()


def close(got, expected, why, atol=1e-9):
    got = None if got is None else np.asarray(got, dtype=np.float64)
    right = got is not None and got.shape == np.shape(expected)
    assert right and np.allclose(got, expected, rtol=0, atol=atol), (
        f"{why}\nexpected {np.asarray(expected)}\ncame     {got}"
    )


def law(lab, logits, wish=PLAIN, generated=(), processors=()):
    """The law of the next token, or a message in words where there is none."""
    got = lab.final_distribution(np.asarray(logits), wish, list(generated), processors)
    assert isinstance(got, np.ndarray), f"final_distribution gives an array; came {got!r}"
    return got


def support(lab, logits, wish=PLAIN, generated=(), processors=()):
    return np.flatnonzero(law(lab, logits, wish, generated, processors)).tolist()


def ban(*ids):
    """A processor that takes some ids out."""

    def banned(logits, ctx):
        row = np.array(logits, dtype=np.float64)
        row[list(ids)] = -np.inf
        return row

    return banned


def bias(**amounts):
    """A processor that adds to some logits: `bias(t0=2.0)`."""

    def biased(logits, ctx):
        row = np.array(logits, dtype=np.float64)
        for name, amount in amounts.items():
            row[int(name[1:])] += amount
        return row

    return biased


def cap(most):
    return lambda logits, ctx: np.minimum(logits, most)


def rows(count, seed):
    """Drawn rows with what one may ask of them: sizes, ties, edges of every knob."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        size = int(draw.integers(2, 12))
        logits = np.round(draw.normal(0, 2, size), int(draw.integers(0, 3)))
        wish = Wish(
            temperature=float(draw.choice((0.3, 1.0, 2.0))),
            top_k=int(draw.choice((0, 1, 2, size, size + 3))),
            top_p=float(draw.choice((1.0, 0.9, 0.5, 0.05))),
            min_p=float(draw.choice((0.0, 0.02, 0.4, 1.0))),
            repetition_penalty=float(draw.choice((1.0, 1.3, 0.6))),
        )
        yield logits, wish, draw.integers(0, size, size=int(draw.integers(0, 6))).tolist()


# --- each stage -----------------------------------------------------------------------------------


def test_min_p_cutoff_is_confidence_relative(lab):
    for logits, min_p, expected, why in (
        (PEAKED, 0.35, [0, 1], "the likeliest has .5, the bound is .175"),
        (FLAT, 0.35, [0, 1, 2, 3, 4], "the likeliest has .22, the bound is .077"),
        (PEAKED, 0.0, [0, 1, 2, 3, 4], "0 is off"),
        (PEAKED, 1.0, [0], "nothing but the likeliest"),
        (np.array([5.0, 5.0, 4.0]), 1.0, [0, 1], "two are the likeliest"),
        (np.array([0.0, np.log(0.5), -np.inf]), 0.5, [0, 1], "exactly half of the likeliest: kept"),
        (np.array([0.0, np.log(0.5) - 1e-9]), 0.5, [0], "a billionth below the bound, in float64"),
        (np.array([-900.0, 800.0, 799.5]), 0.5, [1, 2], "only differences count"),
    ):
        same(kept(lab.apply_min_p(logits, min_p)), expected, f"min_p={min_p}: {why}")
    for min_p in (-0.1, 1.5, float("nan")):
        refused(lambda m=min_p: lab.apply_min_p(PEAKED, m), f"apply_min_p(_, {min_p})")


def test_repetition_penalty_both_signs(lab):
    z = np.array([2.0, -1.0, 0.0, 0.5])
    close(
        lab.apply_repetition_penalty(z, [0, 1, 2], 2.0),
        [1, -2, 0, 0.5],
        "penalty 2 on ids 0, 1, 2 of (2, -1, 0, .5): a negative logit is made smaller by "
        "multiplying; to divide it would be a reward",
    )
    close(lab.apply_repetition_penalty(z, [0, 1], 0.5), [4, -0.5, 0, 0.5], "below 1 is a reward")
    close(lab.apply_repetition_penalty(z, [], 2.0), z, "nothing has been said: a copy")
    close(lab.apply_repetition_penalty(z, [0, 1], 1.0), z, "1.0 changes nothing")
    masked = lab.apply_repetition_penalty(np.array([-np.inf, 1.0]), [0, 1], 2.0)
    same(masked.tolist(), [-np.inf, 0.5], "what is masked stays masked (P2)")


def test_penalty_once_per_distinct_token(lab):
    z = np.array([2.0, -1.0, 0.0, 0.5])
    close(
        lab.apply_repetition_penalty(z, [0, 1, 1, 2, 1, 0], 2.0),
        [1, -2, 0, 0.5],
        "id 1 occurred three times and is penalised once (frequency is another knob)",
    )


def test_penalty_refuses_what_it_cannot_use(lab):
    z = np.zeros(3)
    for penalty in (0.0, -1.0, float("nan"), float("inf")):
        refused(
            lambda p=penalty: lab.apply_repetition_penalty(z, [0], p), f"a penalty of {penalty}"
        )
    for penalty in (1.2, 1.0):
        for ids in ([3], [-1], [0, 7]):
            refused(
                lambda ids=ids, p=penalty: lab.apply_repetition_penalty(z, ids, p),
                f"ids {ids} of a row of 3, penalty {penalty} (numpy would take -1 for the last)",
            )


# --- the hook -------------------------------------------------------------------------------------


def test_a_processor_is_asked_once_per_token(lab):
    seen = []

    def look(logits, ctx):
        seen.append(list(ctx["generated"]))
        return logits

    for generated in ([], [3], [3, 1]):
        lab.sample(PEAKED, PLAIN, generated, [look], np.random.default_rng(0))
    same(seen, [[], [3], [3, 1]], "ctx['generated'] is what the request has said so far, each time")
    for wish in (PLAIN, GREEDY, Wish(top_k=2, min_p=0.1)):
        calls = []

        def count(logits, ctx, calls=calls):
            calls.append(len(ctx["generated"]))
            return logits

        lab.sample(PEAKED, wish, [2], [count, count], np.random.default_rng(0))
        same(
            calls,
            [1, 1],
            f"two processors, one token, temperature {wish.temperature}: each is asked once. It "
            "may be a grammar over 128,000 tokens, or count its calls",
        )


def test_nothing_that_comes_in_is_changed(lab):
    def rude(logits, ctx):
        logits[0] = -np.inf
        ctx["generated"].append(4)
        ctx["generated"][0] = 3
        return logits

    logits, generated = PEAKED.copy(), [1, 2]
    wish = Wish(0.7, 3, 0.9, 0.1, 1.5)
    for chain in ([], [rude]):
        for each in (wish, replace(wish, temperature=0.0)):
            lab.sample(logits, each, generated, chain, np.random.default_rng(0))
    for call in (
        lambda: lab.apply_min_p(logits, 0.0),
        lambda: lab.apply_min_p(logits, 0.5),
        lambda: lab.apply_repetition_penalty(logits, [0], 2.0),
        lambda: lab.apply_repetition_penalty(logits, [0], 1.0),
    ):
        call()[:] = 7.0
    close(logits, PEAKED, "the logits belong to the caller, whatever a processor does (P3)")
    same(generated, [1, 2], "so does the list of ids")
    close(
        law(lab, logits, wish, generated, [rude]),
        law(lab, logits, wish, generated, [ban(0)]),
        "the penalty acts on what was generated, not on what a processor wrote into its copy",
    )


def test_banned_token_is_unsamplable(lab):
    draw = np.random.default_rng(3)
    for logits, wish, generated in rows(60, seed=4):
        banned = int(draw.integers(len(logits)))
        got = law(lab, logits, wish, generated, [ban(banned)])
        same(
            float(got[banned]),
            0.0,
            f"id {banned} is at -inf after the processors, so its mass is 0 (P2); {wish}",
        )
    rng = np.random.default_rng(5)
    wish = Wish(top_k=3, top_p=0.9, min_p=0.05)
    said = {lab.sample(PEAKED, wish, [0], [ban(0)], rng) for _ in range(500)}
    same(sorted(said), [1, 2, 3], "500 draws with the likeliest token banned, top_k=3")


def test_all_masked_raises(lab):
    for wish in (PLAIN, GREEDY):
        refused(
            lambda wish=wish: lab.sample(PEAKED, wish, [], [ban(0, 1, 2, 3, 4)]),
            f"every token banned, temperature {wish.temperature}: nothing is left to choose, so it",
        )


# --- the order ------------------------------------------------------------------------------------


def test_penalty_applies_to_greedy(lab):
    z = np.array([2.0, 1.5, 0.0])
    strong = replace(GREEDY, repetition_penalty=2.0)
    close(law(lab, z, strong, [0]), [0, 1, 0], "greedy is the argmax of the *edited* row (P1)")
    same(lab.sample(z, strong, [0]), 1, "(2, 1.5, 0), id 0 said before, penalty 2: 1 < 1.5")
    close(
        law(lab, z, Wish(repetition_penalty=2.0), [0]),
        [0.331499, 0.546549, 0.121952],
        "the same row at temperature 1",
        1e-6,
    )
    same(lab.sample(z, GREEDY, [], [ban(0)]), 1, "a banned token is not greedy's choice either")
    same(lab.sample(z, strong, [0] + [2] * 400), 1, "id 0 was said 400 tokens ago, and counts")


def test_greedy_takes_the_lowest_id_and_draws_nothing(lab, monkeypatch):
    def no_generator(*_):
        raise AssertionError("a greedy row needs no generator (P4); expected none, came one")

    rng = np.random.default_rng(7)
    before = rng.bit_generator.state
    monkeypatch.setattr(np.random, "default_rng", no_generator)
    z = np.array([1.0, 3.0, 2.0, 3.0], dtype=np.float32)
    for knobs in ({}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}, {"seed": 3}):
        wish = replace(GREEDY, **knobs)
        same(repr(lab.sample(z, wish, [])), "1", f"two equal maxima: the lowest id; {knobs}")
        same(lab.sample(z, wish, [], (), rng), 1, f"with a generator the same; {knobs}")
    same(law(lab, z, GREEDY).tolist(), [0.0, 1.0, 0.0, 0.0], "the law of a greedy row: one 1")
    same(rng.bit_generator.state, before, "the generator that was given has not moved (P4)")


def test_only_temperature_0_is_greedy(lab):
    got = law(lab, np.zeros(2), Wish(temperature=1e-6), (), [bias(t1=1e-6)])
    close(
        got,
        [0.268941, 0.731059],
        "logits 0 and 0, a bias of 1e-6 on the second, temperature 1e-6: as 0 and 1 at 1",
        1e-6,
    )
    rng = np.random.default_rng(6)
    said = {lab.sample(np.zeros(2), Wish(temperature=1e-6), [], (), rng) for _ in range(50)}
    same(said, {0, 1}, "50 draws of two equal logits, temperature 1e-6")
    for temperature in (-1.0, float("nan")):
        refused(
            lambda t=temperature: lab.sample(PEAKED, Wish(temperature=t), [], (), rng),
            f"a temperature of {temperature}",
        )


def test_bias_does_not_commute_with_temperature(lab, record_property):
    z = np.array([2.0, 0.0])
    lower = bias(t0=-1.0)
    got = law(lab, z, Wish(temperature=0.5), (), [lower])
    close(
        np.log(got[0] / got[1]),
        2.0,
        "(2, 0), bias -1, temperature .5: processors act before the temperature, so the odds are "
        "(2 - 1) / .5 = 2 and not 2 / .5 - 1 = 3",
    )
    record_property("measured.odds", float(np.log(got[0] / got[1])))


def test_the_filters_stand_in_their_order(lab, record_property):
    got = support(lab, PEAKED, Wish(min_p=0.35, top_p=0.65))
    record_property("measured.survivors", len(got))
    same(
        got,
        [0],
        "min_p=.35 leaves .5 and .2, which are .714 and .286 of what is left; the first alone "
        "reaches top_p=.65. The other way round two would stay",
    )
    same(
        support(lab, np.log([0.4, 0.3, 0.2, 0.1]), Wish(top_k=2, top_p=0.55)),
        [0],
        "top_k=2 leaves .571 and .429 of the rest; the first reaches .55",
    )
    for T, expected in ((0.5, 1), (1.0, 2), (2.0, 4)):
        got = support(lab, PEAKED, Wish(temperature=T, min_p=0.35))
        same(
            len(got),
            expected,
            f"(.5, .2, .15, .1, .05) with min_p=.35 at temperature {T}: min-p judges the row that "
            "the temperature has made",
        )


def test_processors_run_before_truncation(lab):
    got = law(lab, PEAKED, Wish(top_k=1), (), [ban(0)])
    close(
        got,
        [0, 1, 0, 0, 0],
        "the likeliest banned and top_k=1: the runner-up. Truncated first, nothing would be left",
    )
    close(
        law(lab, PEAKED, Wish(repetition_penalty=4.0, top_k=1), [0, 1]),
        [0, 0, 1, 0, 0],
        "0 and 1 penalised (all logits are negative, so times 4) and top_k=1",
    )


# --- the draw -------------------------------------------------------------------------------------


def test_one_draw_from_the_generator_given(lab):
    for wish in (PLAIN, Wish(0.7, 3, 0.95, 0.05, 1.2, seed=11)):
        expected_law = law(lab, PEAKED, wish, [1])
        ours, reference = np.random.default_rng(12), np.random.default_rng(12)
        got = [lab.sample(PEAKED, wish, [1], (), ours) for _ in range(20)]
        expected = [int(reference.choice(5, p=expected_law)) for _ in range(20)]
        same(got, expected, f"20 tokens from one generator, seed {wish.seed} of the request unused")
        same(
            ours.bit_generator.state,
            reference.bit_generator.state,
            "one choice per token, no number more (P4)",
        )


def test_without_a_generator_the_seed_decides(lab):
    z = np.zeros(1000)
    for seed in (0, 7):
        expected = int(np.random.default_rng(seed).choice(1000, p=np.full(1000, 1 / 1000)))
        for _ in range(2):
            same(lab.sample(z, Wish(seed=seed), []), expected, f"seed {seed}, 1,000 equal tokens")
    many = {lab.sample(z, Wish(), []) for _ in range(20)}
    assert len(many) > 5, (
        f"no seed: another token nearly every time\nexpected many\ncame     {many}"
    )


@pytest.mark.slow
def test_frequencies_are_the_law(lab):
    draws, wish = 4_000, Wish(1.3, 4, 0.99, 0.05, 1.2)
    rng = np.random.default_rng(13)
    counts = np.bincount(
        [lab.sample(PEAKED, wish, [0], (), rng) for _ in range(draws)], minlength=5
    )
    expected = draws * law(lab, PEAKED, wish, [0])
    own = expected > 0
    same(int(counts[~own].sum()), 0, "no draw of a token with probability 0")
    chi2 = float(((counts - expected)[own] ** 2 / expected[own]).sum())
    limit = own.sum() - 1 + 10 * (2 * (own.sum() - 1)) ** 0.5
    assert chi2 < limit, (
        f"chi-squared of {draws:,} draws against final_distribution\nexpected below {limit:.1f}\n"
        f"came     {chi2:.1f}"
    )


# --- the real sampler -----------------------------------------------------------------------------


def asked(case) -> Wish:
    """What a recorded row asks for; upstream raises small temperatures to .01."""
    params = {name: case["params"].get(name, off) for name, off in vars(PLAIN).items()}
    temperature = params["temperature"]
    return Wish(**{**params, "temperature": temperature and max(temperature, 0.01)})


def edits_of(case) -> list:
    """The edits of a recorded row that are not the lab's, as processors, in upstream's order."""
    params, output = case["params"], case["output_token_ids"]
    size = len(case["logits"])
    allowed = params.get("allowed_token_ids") or range(size)
    chain = [ban(*(set(range(size)) - set(allowed)))]
    for *before, last in case["bad_words_token_ids"]:
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            chain.append(ban(last))
    if len(output) < params.get("min_tokens", 0):
        chain.append(ban(*params.get("stop_token_ids", ()), case["eos_token_id"]))
    chain.append(bias(**{f"t{token}": b for token, b in params.get("logit_bias", {}).items()}))
    return chain


def test_the_real_samplers_rows(lab):
    """Any other order, on a row of the recording."""
    agree, wrong = Counter(), []
    for case in parts.load("sampler"):
        params = case["params"]
        if "frequency_penalty" in params or "presence_penalty" in params:
            continue  # not in this lab
        said = case["prompt_token_ids"] + case["output_token_ids"]
        asks = (read(case["logits"]), asked(case), said, edits_of(case))
        if not np.isfinite(read(case["edited"])).any():
            refused(lambda a=asks: lab.sample(*a), f"{params} of a row that is empty after edits")
            agree["empty"] += 1
            continue
        kind = "greedy" if case["probs"] is None else "drawn"
        expected, atol = np.eye(len(case["logits"]))[case["token"]], 1e-9
        if kind == "drawn":
            expected, atol = np.asarray(case["probs"]), tolerance(read(case["processed"]))
        with np.errstate(all="ignore"):
            got = law(lab, *asks)
        if np.allclose(got, expected, rtol=0, atol=atol):
            agree[kind] += 1
        else:
            wrong.append((len(expected), case["batch"], kind, params, said, case, got, expected))
    total = sum(agree.values()) + len(wrong)
    if wrong:
        _, batch, kind, params, said, case, got, expected = min(wrong, key=lambda each: each[:2])
        tally = Counter(each[2] for each in wrong)
        pytest.fail(
            f"{total - len(wrong)} of {total} recorded rows agree; of those that do not, "
            + ", ".join(f"{count} are {name}" for name, count in tally.items())
            + f". The smallest: batch {batch} of vLLM's sampler, {params}, said before {said}, bad "
            f"words {case['bad_words_token_ids']}\nlogits   {np.round(read(case['logits']), 4)}\n"
            f"expected {np.round(expected, 4)}\ncame     {np.round(got, 4)}",
            pytrace=False,
        )
    assert min(agree[kind] for kind in ("empty", "greedy", "drawn")) > 3, agree


@pytest.mark.slow
def test_the_edits_are_those_of_the_real_sampler(lab):
    """The penalty before the processors: a row where that shows has further penalties, as last."""
    for case in sorted(parts.load("sampler"), key=lambda case: len(case["logits"])):
        params, edited = case["params"], read(case["edited"])
        if not np.isfinite(edited).any():
            continue  # test_the_real_samplers_rows
        said = case["prompt_token_ids"] + case["output_token_ids"]
        wish = Wish(repetition_penalty=asked(case).repetition_penalty)
        got = law(lab, read(case["logits"]), wish, said, edits_of(case))
        counts = np.bincount(case["output_token_ids"], minlength=len(edited))
        less = params.get("frequency_penalty", 0) * counts
        less = less + params.get("presence_penalty", 0) * (counts > 0)
        with np.errstate(divide="ignore"):
            got = lab.softmax(np.log(got) - less)
        close(
            got,
            lab.softmax(edited),
            f"the law after processors and penalty alone (temperature 1, no filter): {params}, "
            f"prompt {case['prompt_token_ids']}, output {case['output_token_ids']}\n"
            f"logits   {np.round(read(case['logits']), 4)}",
            tolerance(edited),
        )


MAY_CHANGE_PLACES = [{"penalty", "temperature"}, {"temperature", "top_k"}, {"min_p", "top_k"}]


def test_an_order_is_shown_by_a_row(lab):
    """A pair taken for one that commutes; rows that show nothing."""
    for first, second in itertools.combinations(lab.STAGES, 2):
        found = lab.witness(first, second)
        pair = f"witness({first!r}, {second!r})"
        if {first, second} in MAY_CHANGE_PLACES:
            same(found, None, f"{pair}: no row tells these two apart, in whatever order they are")
            continue
        assert found is not None, (
            f"{pair}: there are rows on which the order of these two matters\n"
            "expected a row and knobs\ncame     None"
        )
        row, knobs = np.asarray(found[0], dtype=np.float64), found[1]
        right = row.ndim == 1 and 2 <= len(row) <= 12 and np.isfinite(row).all()
        assert right and knobs.temperature > 0, f"{pair}: a row of 2 to 12 logits; came {found}"
        laws = []
        for order in ((first, second), (second, first)):
            after = row
            for name in order:
                after = lab.STAGES[name](after, knobs)
            laws.append(lab.softmax(after))
        apart = float(np.abs(laws[0] - laws[1]).max())
        assert apart >= 0.01, (
            f"{pair} gave {np.round(row, 3).tolist()} and {knobs}: {first} first gives "
            f"{np.round(laws[0], 4)}, {second} first {np.round(laws[1], 4)}\n"
            f"expected two laws that differ by .01 somewhere\ncame     {apart:.2g}"
        )


# --- the engine -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4])
def test_the_engine_says_the_same_with_your_sampler(lab, seed):
    prompts = ["The KV cache is", "A block", "def f(x):"]
    wishes = [
        SamplingParams(temperature=0.8, top_k=20, seed=seed, max_tokens=16, ignore_eos=True),
        SamplingParams(
            temperature=1.2, top_p=0.9, min_p=0.02, seed=seed, max_tokens=16, ignore_eos=True
        ),
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    ]
    texts = []
    for engine_parts in (EngineParts(), EngineParts(sampler=lab.Sampler)):
        engine = LLMEngine(shipped_model(), parts=engine_parts)
        found = engine.generate(prompts, wishes)
        texts.append([result.outputs[0].text for result in found])
    same(texts[1], texts[0], f"seed {seed}: your sampler in the engine says what the engine's says")
