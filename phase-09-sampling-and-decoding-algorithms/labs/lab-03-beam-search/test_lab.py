"""What lab 09-03 pins: a search, its pruning, its ends, and where greedy and width lose."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from labkit import refused, same, shipped_model
from mini_vllm import EngineParts, LLMEngine, Sampler, SamplingParams

LETTERS = "ABCDE"
E = 4
FIFTHS = dict.fromkeys(LETTERS, 0.2)


def table(size=5, **rows):
    """A model from rows of probabilities by what was said: `root={"A": .6}`, `AB={...}`.

    What has no row of its own goes by the last letter, with `_` before it: `_A={...}`.
    """

    def fn(tokens):
        said = "".join(LETTERS[token] for token in tokens)
        row = rows["root"] if not said else rows.get(said) or rows.get("_" + said[-1])
        assert row, f"{said!r} ends in EOS or cannot be reached: it must not be extended (W2)"
        with np.errstate(divide="ignore"):
            return np.log([row.get(LETTERS[token], 0.0) for token in range(size)])

    return fn


TRAP = table(
    root={"A": 0.6, "B": 0.4}, A={"C": 0.51, "D": 0.49}, B={"C": 0.9, "D": 0.1}
)  # fmt: skip
WIDER_LOSES = table(
    root={"A": 0.5, "B": 0.45, "C": 0.05},
    A={"A": 0.4, "B": 0.3, "C": 0.3}, B={"A": 0.51, "B": 0.49}, C={"A": 1.0},
    AA={"A": 1.0}, AB={"A": 1.0}, AC={"A": 1.0}, CA={"A": 1.0}, BA=FIFTHS, BB=FIFTHS,
)  # fmt: skip
EOS = table(
    root={"A": 0.6, "B": 0.4}, _A={"E": 0.9, "C": 0.1}, _B={"C": 0.6, "D": 0.4},
    _C={"C": 0.5, "D": 0.4, "E": 0.1}, _D={"D": 0.6, "C": 0.3, "E": 0.1},
)  # fmt: skip
LATE = table(
    root={"A": 0.6, "E": 0.4}, _A={"B": 0.95, "C": 0.05}, _B={"E": 0.95, "A": 0.05}, _C={"E": 1.0}
)  # fmt: skip
EOS_POOL = table(
    root={"A": 0.5, "E": 0.45, "B": 0.05}, _A={"C": 0.55, "D": 0.45}, _B={"C": 0.6, "D": 0.4}
)  # fmt: skip
LENGTH = table(
    root={"A": 0.6, "B": 0.4}, _A={"E": 0.5, "C": 0.3, "D": 0.2}, _B={"C": 0.9, "D": 0.1},
    _C={"D": 0.9, "E": 0.1}, _D={"E": 0.9, "A": 0.1},
)  # fmt: skip


def found(hypotheses):
    """[(letters, probability)], to twelve digits."""
    right = isinstance(hypotheses, list) and hypotheses
    assert right, (
        f"a list of at least one hypothesis\nexpected one or more\ncame     {hypotheses!r}"
    )
    return [
        ("".join(LETTERS[token] for token in each.tokens), round(math.exp(each.score), 12))
        for each in hypotheses
    ]


def random_table(rng, size, depth, sharp=1.0):
    """A model whose rows are drawn once per prefix."""
    rows = {}

    def fn(tokens):
        assert len(tokens) < depth, f"asked about {tokens}: longer than max_len - 1"
        if tokens not in rows:
            rows[tokens] = np.log(rng.dirichlet(np.full(size, sharp)))
        return rows[tokens]

    return fn


def counted(fn):
    """The same model, and how often it was asked about what."""
    calls = Counter()

    def asked(tokens):
        calls[tuple(tokens)] += 1
        return fn(tokens)

    return asked, calls


# --- greedy loses ---------------------------------------------------------------------------------


def test_greedy_takes_the_garden_path(lab):
    got = lab.greedy_decode(TRAP, 2)
    same(found([got]), [("AC", 0.306)], "A is the likelier first token; nothing after it is likely")
    same(got.finished, False, "no EOS: not finished")
    tied = lab.greedy_decode(lambda tokens: np.log([0.2, 0.4, 0.4]), 3)
    same(tied.tokens, (1, 1, 1), "of equal tokens the lowest id")
    ended = lab.greedy_decode(EOS, 9, E)
    same((found([ended]), ended.finished), ([("AE", 0.54)], True), "EOS ends it, and counts")
    late = lab.greedy_decode(lambda tokens: np.log([0.7, 0.3]), 4, 1)
    same((late.tokens, late.finished), ((0,) * 4, False), "max_len ends it without EOS")


def test_beam_escapes_the_trap(lab):
    got = lab.beam_search(TRAP, 2, 2)
    same(
        found(got),
        [("BC", 0.36), ("AC", 0.306)],
        "width 2 keeps B, and finds that BC (.4 x .9) is likelier than AC",
    )
    same(round(got[0].score, 5), -1.02165, "the score is the sum of the logarithms")


def test_beam_width_one_is_greedy(lab):
    rng = np.random.default_rng(1)
    models = [(random_table(rng, 5, 6), 6, eos) for eos in (None, 4, 0) for _ in range(8)]
    for fn, max_len, eos in [*models, (EOS_POOL, 2, E), (TRAP, 2, None), (EOS, 4, E)]:
        beams = lab.beam_search(fn, 1, max_len, eos)
        assert isinstance(beams, list) and len(beams) == 1, f"width 1, one result; came {beams}"
        beam = beams[0]
        greedy = lab.greedy_decode(fn, max_len, eos)
        same(
            (beam.tokens, beam.finished),
            (greedy.tokens, greedy.finished),
            "width 1 is greedy: one survivor a step, the best child (an EOS among them)",
        )
        assert abs(beam.score - greedy.score) < 1e-12, (
            f"and the same score\nexpected {greedy.score}\ncame     {beam.score}"
        )


# --- width ----------------------------------------------------------------------------------------


def test_wider_beams_never_score_worse_here(lab):
    best = [found(lab.beam_search(TRAP, width, 2))[0][1] for width in (1, 2, 3, 4)]
    same(best, [0.306, 0.36, 0.36, 0.36], "TRAP, widths 1 to 4 (true of this table only)")


def test_wider_beam_can_lose(lab, record_property):
    best = [found(lab.beam_search(WIDER_LOSES, width, 3))[0][1] for width in (1, 2, 3)]
    record_property("measured.wider", best[1])
    same(
        best,
        [0.2, 0.0459, 0.2],
        "WIDER-LOSES, widths 1 to 3: at width 2 BA (.2295) and BB (.2205) push AA (.2) out of the "
        "beam, and what follows them is five times .2. Pruning is over all children, whosever they "
        "are (W1)",
    )


def test_full_width_equals_exhaustive(lab):
    rng = np.random.default_rng(2)
    for alpha in (0.0, 1.0):
        fn = random_table(rng, 4, 4, sharp=0.5)
        every = []
        for tokens in itertools.product(range(4), repeat=4):
            score = sum(float(fn(tokens[:i])[token]) for i, token in enumerate(tokens))
            every.append((tokens, score))
        every.sort(key=lambda each: -each[1])
        got = lab.beam_search(fn, 64, 4, None, alpha)
        same(
            [each.tokens for each in got],
            [tokens for tokens, _ in every[:64]],
            f"4 ids, 4 steps, width 64: no prefix is lost, so the best 64 of 256; alpha {alpha}",
        )


def test_survivors_are_the_best_of_all_children(lab):
    rng = np.random.default_rng(3)
    for width in (2, 3, 5):
        fn = random_table(rng, 6, 5)
        live = [((), 0.0)]
        for _ in range(5):
            children = [
                ((*tokens, token), score + float(fn(tokens)[token]))
                for tokens, score in live
                for token in range(6)
            ]
            live = sorted(children, key=lambda each: (-each[1], each[0]))[:width]
        got = lab.beam_search(fn, width, 5)
        same([each.tokens for each in got], [tokens for tokens, _ in live], f"width {width} (W1)")


# --- ends -----------------------------------------------------------------------------------------


def test_eos_finishes_a_beam(lab):
    got = lab.beam_search(EOS, 2, 4, E)
    same(
        [(*pair, each.finished) for pair, each in zip(found(got), got, strict=True)],
        [("AE", 0.54, True), ("BCCC", 0.06, False)],
        "AE finishes after two tokens and stays among the results; BCCC is live at max_len",
    )


def test_first_finish_does_not_stop_search(lab):
    same(
        found(lab.beam_search(LATE, 2, 3, E))[0],
        ("ABE", 0.5415),
        "E (.4) finishes at once; A (.6) is better and goes on: .6 x .95 x .95",
    )


def test_never_extends_past_eos(lab):
    rng = np.random.default_rng(4)
    for eos in (0, 2):
        fn, calls = counted(random_table(rng, 3, 7))
        got = lab.beam_search(fn, 4, 7, eos)
        asked = [tokens for tokens in calls if eos in tokens]
        same(asked, [], f"sequences with EOS (id {eos}) the model was asked about (W2)")
        for each in got:
            same(each.finished, each.tokens[-1] == eos, f"finished, of {each.tokens}")
            same(eos in each.tokens[:-1], False, f"EOS inside {each.tokens}")


def test_eos_competes_for_its_place(lab):
    same(
        found(lab.beam_search(EOS_POOL, 1, 2, E)),
        [("AC", 0.275)],
        "width 1: A (.5) survives the first step, E (.45) does not. An EOS that needs no place "
        "would win with .45 (W2)",
    )
    same(
        found(lab.beam_search(EOS_POOL, 2, 2, E)),
        [("E", 0.45), ("AC", 0.275)],
        "width 2: E takes one of the two places and leaves one live beam",
    )


def test_each_sequence_comes_once(lab):
    for fn, width, max_len in ((EOS, 3, 4), (LATE, 4, 5), (LENGTH, 4, 5)):
        letters = [word for word, _ in found(lab.beam_search(fn, width, max_len, E))]
        same(len(letters), len(set(letters)), f"results {letters}: none of them twice")
        assert len(letters) <= width, f"at most {width} results\ncame {letters}"


def test_impossible_children_are_dropped(lab):
    same(
        found(lab.beam_search(TRAP, 6, 2)),
        [("BC", 0.36), ("AC", 0.306), ("AD", 0.294), ("BD", 0.04)],
        "width 6, but only four sequences are possible: a child at -inf is none",
    )


# --- scores ---------------------------------------------------------------------------------------


def test_log_domain_survives_2000_steps(lab):
    def fn(tokens):
        return np.log([0.5, 0.5])

    for got in (lab.greedy_decode(fn, 2000), lab.beam_search(fn, 1, 2000)[0]):
        assert abs(got.score - 2000 * math.log(0.5)) < 1e-6, (
            "2,000 tokens of probability .5: a product is 0 after some 1,075 of them (W3)\n"
            f"expected {2000 * math.log(0.5):.3f}\ncame     {got.score}"
        )


def test_length_normalisation_flips_winner(lab, record_property):
    plain = lab.beam_search(LENGTH, 2, 4, E)
    same(found(plain)[0], ("AE", 0.3), "alpha 0: the shorter one, .6 x .5")
    normalised = lab.beam_search(LENGTH, 2, 4, E, alpha=1.0)
    record_property("measured.winner", found(normalised)[0][0])
    same(
        found(normalised)[0],
        ("BCDE", 0.2916),
        "alpha 1: -1.232 over four tokens is -.308, -1.204 over two is -.602",
    )


def test_normalisation_ranks_and_does_not_prune(lab):
    fn = table(
        root={"A": 0.55, "B": 0.45}, _A={"E": 0.5, "C": 0.5}, _B={"C": 0.52, "D": 0.48},
        _C={"E": 0.9, "C": 0.1}, _D={"E": 1.0},
    )  # fmt: skip
    for alpha, expected in ((0.0, ["AE", "ACE"]), (1.0, ["ACE", "AE"]), (3.0, ["ACE", "ACC"])):
        same(
            [word for word, _ in found(lab.beam_search(fn, 2, 3, E, alpha))],
            expected,
            f"alpha {alpha}: both survivors of step two come from A (.275 each, B's children have "
            ".234 and .216); alpha reorders what was found, it finds nothing else",
        )


def test_eos_counts_as_a_token(lab):
    fn = table(
        root={"A": 0.5, "B": 0.5}, _A={"E": 0.5, "C": 0.25, "D": 0.25},
        _B={"C": 0.5, "D": 0.25, "A": 0.25}, _C={"D": 0.48, "C": 0.3, "A": 0.22},
    )  # fmt: skip
    same(
        [word for word, _ in found(lab.beam_search(fn, 2, 3, E, alpha=1.0))],
        ["AE", "BCD"],
        "alpha 1: AE has -1.386 over two tokens, -.693; BCD -2.120 over three, -.707. Without EOS "
        "in its length AE would have -1.386",
    )


def test_ties_are_deterministic(lab):
    def fn(tokens):
        return np.log([0.25] * 4)

    got = [each.tokens for each in lab.beam_search(fn, 3, 2)]
    same(got, [(0, 0), (0, 1), (0, 2)], "all sequences equal: the smaller ids first (W4)")
    got = [each.tokens for each in lab.beam_search(fn, 3, 2, 1)]
    same(got, [(1,), (0, 0), (0, 1)], "the same with EOS 1: (1,) is likelier, being shorter")
    parents = table(root={"A": 0.25, "B": 0.5, "C": 0.25}, A={"A": 1.0}, B={"A": 0.5, "B": 0.5})
    same(
        found(lab.beam_search(parents, 2, 2)),
        [("AA", 0.25), ("BA", 0.25)],
        "AA, BA, BB have .25 each: the ids decide, not the better parent",
    )
    ended = table(
        root={"A": 0.5, "B": 0.25, "E": 0.25}, A={"A": 0.5, "B": 0.5}, B={"C": 1.0}
    )  # fmt: skip
    same(
        found(lab.beam_search(ended, 3, 2, E)),
        [("AA", 0.25), ("AB", 0.25), ("BC", 0.25)],
        "AA, AB, BC and E, all .25: the ids decide, not the length",
    )


def test_a_run_of_the_model_per_live_beam(lab):
    rng = np.random.default_rng(5)
    for width, max_len in ((1, 6), (4, 6), (9, 3)):
        fn, calls = counted(random_table(rng, 3, max_len))
        lab.beam_search(fn, width, max_len)
        most = sum(min(width, 3**depth) for depth in range(max_len))
        assert max(calls.values()) == 1 and sum(calls.values()) == most, (
            f"width {width}, {max_len} steps, 3 ids: one run per live beam and step\n"
            f"expected {most} runs, each of another sequence\n"
            f"came     {sum(calls.values())}, at most {max(calls.values())} of one"
        )


def test_bad_arguments_are_refused(lab):
    for width, max_len in ((0, 3), (-1, 3), (2, 0)):
        refused(lambda w=width, m=max_len: lab.beam_search(TRAP, w, m), f"{width=}, {max_len=}")
    refused(lambda: lab.greedy_decode(TRAP, 0), "greedy_decode with max_len=0")


# --- the shipped model ----------------------------------------------------------------------------


@functools.cache
def asked_model(prompt):
    """The shipped model after a prompt, asked as vLLM asks: a one-token request per question."""
    rows = []

    class Keep(Sampler):
        def sample(self, logits, params, rng=None):
            rows.append(np.array(logits))
            return super().sample(logits, params, rng)

    engine = LLMEngine(shipped_model(), parts=EngineParts(sampler=Keep))
    once = SamplingParams(max_tokens=1, ignore_eos=True)

    @functools.cache
    def fn(tokens):
        engine.generate([list(prompt.encode()) + list(tokens)], once)
        row = rows.pop()
        return row - row.max() - np.log(np.exp(row - row.max()).sum())

    return fn


@pytest.mark.slow
def test_on_the_shipped_model(lab):
    prompt, length = "The scheduler", 10
    fn = asked_model(prompt)
    engine = LLMEngine(shipped_model())
    (text,) = engine.generate([prompt], SamplingParams(max_tokens=length, ignore_eos=True))
    greedy = lab.greedy_decode(fn, length)
    same(list(greedy.tokens), list(text.outputs[0].token_ids), "greedy is the engine's greedy text")
    beams = lab.beam_search(fn, 4, length)
    for each in beams:
        score = sum(float(fn(each.tokens[:i])[token]) for i, token in enumerate(each.tokens))
        assert abs(score - each.score) < 1e-9, (
            f"the score of {bytes(each.tokens)!r} is the sum of its log-probabilities\n"
            f"expected {score}\ncame     {each.score}"
        )
    assert beams[0].score > greedy.score + 0.1, (
        f"width 4 finds a likelier text here: {bytes(beams[0].tokens)!r} for "
        f"{bytes(greedy.tokens)!r}\nexpected above {greedy.score:.4f}\n"
        f"came     {beams[0].score:.4f}"
    )
