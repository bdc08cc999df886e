"""What lab 19-06 pins: what a loop asks, what caps a score, what an unasked row is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from labkit import refused, same
from labkit.yaml_files import read_yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MATERIAL: Any = read_yaml((HERE / "material.yaml").read_text(encoding="utf-8"))
SCENARIOS, SYMPTOMS = MATERIAL["scenarios"], MATERIAL["symptoms"]


def bank(count: int = 6) -> dict[int, list[str]]:
    """So many questions in every phase, no two alike."""
    return {phase: [f"{phase}.{n}" for n in range(count)] for phase in range(20)}


def drawn(lab: Any, seed: int, questions: Any = None) -> Any:
    return lab.draw(questions or bank(), seed, SCENARIOS, SYMPTOMS)


def texts(loop: Any) -> list[str]:
    return [
        *(text for _, text in loop.rapid), *(text for _, *two in loop.systems for text in two),
        *(text for _, text in loop.breadth),
    ]  # fmt: skip


def answer(lab: Any, **other: Any) -> Any:
    best = {
        "row": "memory", "derived": True, "followups_ok": True, "peeked": False, "knew_of": True,
        "arithmetic_exists": True, "arithmetic_shown": True,
    }  # fmt: skip
    return lab.Answer(**(best | other))


def test_worked_scores(lab):
    """The six of the page, and what a word alone does not decide."""
    for other, expected in (
        ({}, 3), ({"arithmetic_shown": False}, 2), ({"peeked": True}, 2),
        ({"followups_ok": False}, 2), ({"derived": False, "followups_ok": False}, 1),
        ({"derived": False, "followups_ok": False, "knew_of": False}, 0),
        ({"derived": False}, 1), ({"knew_of": False}, 3),
    ):  # fmt: skip
        same(lab.score(answer(lab, **other)), expected, f"the best answer, but {other}:")


def test_peek_caps_at_two(lab):
    """A look is not the end of an answer, and not a point less each."""
    same(lab.score(answer(lab, peeked=True, arithmetic_shown=False)), 2, "a look and no sum:")
    same(lab.score(answer(lab, peeked=True, followups_ok=False)), 2, "a look, follow-ups failed:")


def test_skipped_arithmetic_caps_at_two(lab):
    """A sum that the model answer has; where there is none, nothing is missing."""
    came = lab.score(answer(lab, arithmetic_exists=False, arithmetic_shown=False))
    same(came, 3, "no sum exists and none is shown:")


def test_caps_never_raise_a_score(lab):
    """A cap that is an assignment lifts a 0 to a 2."""
    nothing = {"derived": False, "followups_ok": False, "knew_of": False}
    for cap in ({"peeked": True}, {"arithmetic_shown": False}):
        same(lab.score(answer(lab, **nothing, **cap)), 0, f"nothing known, {cap}:")
        heard = {**nothing, "knew_of": True}
        same(lab.score(answer(lab, **heard, **cap)), 1, f"heard of, {cap}:")


def test_row_takes_minimum(lab):
    """A mean hides the question that an interviewer remembers."""
    given = [answer(lab, derived=False, followups_ok=False), answer(lab, peeked=True)]
    given += [answer(lab), answer(lab, row="latency")]
    same(lab.matrix(given[::-1])["memory"], 1, "memory with 3, 2 and 1:")
    came = lab.matrix(given)
    same(came["memory"], 1, "memory with 1, 2 and 3:")
    same(came["latency"], 3, "latency with 3:")
    same(list(came), list(lab.ROWS), "the rows, in the map's order:")


def test_unasked_row_is_none_not_zero(lab):
    """Not asked is not known and not unknown."""
    same(lab.matrix([])["hardware"], None, "hardware without an answer:")
    zero = answer(lab, row="hardware", derived=False, followups_ok=False, knew_of=False)
    same(lab.matrix([zero])["hardware"], 0, "hardware, nothing known:")


def test_revision_list_maps_rows_to_phases(lab):
    """What to read again: weak rows first, then those never asked."""
    found = {"fundamentals": 3, "memory": 1, "throughput": 2, "kernels and precision": 0,
             "latency": None, "scale-out": 2, "productisation": 3, "hardware": None}  # fmt: skip
    same(lab.revision_list(found, lab.ROWS), [2, 4, 5, 6, 7, 8, 9, 17], f"{found}:")
    overlap = {"a": 1, "b": None}
    same(lab.revision_list(overlap, {"a": (7, 3), "b": (3, 1)}), [3, 7, 1], "phase 3 in both:")


def test_compare_says_what_changed(lab):
    """A month later; a row that was not asked once cannot be compared."""
    old = {"memory": 1, "latency": 2, "hardware": None, "scale-out": 3}
    new = {"memory": 3, "latency": 2, "hardware": 2, "scale-out": 0}
    same(lab.compare(old, new), {"memory": (1, 3), "scale-out": (3, 0)}, f"{old}, then {new}:")


def test_session_counts(lab, record_property):
    """Eight, five with a follow-up each, one, two, four; nothing twice."""
    loop = drawn(lab, 0)
    counts = [len(part) for part in (loop.rapid, loop.systems, loop.symptoms, loop.breadth)]
    same(counts, [8, 5, 2, 4], "rapid fire, systems, symptoms, breadth:")
    followed = sum(bool(then) for *_, then in loop.systems)
    record_property("measured.per_loop", counts[0] + counts[1] + followed + counts[3])
    by_phase = sorted(phase for phase, _ in loop.rapid)
    same(by_phase, [0, 0, 1, 1, 2, 2, 3, 3], "phases of the rapid fire, sorted:")
    same(sorted(phase for phase, *_ in loop.systems), [4, 5, 6, 7, 8], "phases of systems:")
    same(sorted(phase for phase, _ in loop.breadth), [12, 14, 16, 17], "phases of breadth:")
    loop = lab.draw(bank(), 0, SCENARIOS, SYMPTOMS, breadth=(9, 18))
    same(sorted(phase for phase, _ in loop.breadth), [9, 18], "breadth of phases 9 and 18:")
    for seed in range(30):
        asked = texts(drawn(lab, seed, bank(2)))
        same(len(asked), len(set(asked)), f"seed {seed}, 2 questions a phase, asked {asked}:")
        two = [each["ask"] for each in drawn(lab, seed).symptoms]
        same(len(set(two)), 2, f"seed {seed}, symptoms {two}:")


def test_draw_is_deterministic_and_seed_dependent(lab):
    """A loop can be sat again; the module's random state is everybody's."""
    random.seed(1)
    first = drawn(lab, 5)
    random.seed(2)
    state = random.getstate()
    same(drawn(lab, 5), first, "seed 5, drawn twice:")
    assert random.getstate() == state, (
        "expected the module's own random state as it was, came another: use random.Random(seed)"
    )
    loops = [drawn(lab, seed) for seed in range(30)]
    for what, found in (
        ("scenario", {each.scenario["title"] for each in loops}),
        ("symptoms", {tuple(sorted(s["ask"] for s in each.symptoms)) for each in loops}),
        ("question of session 2", {each.systems[0] for each in loops}),
        ("question of session 5", {each.breadth[0] for each in loops}),
    ):
        assert len(found) > 1, f"thirty seeds: expected more than one {what}, came {found}"
    others = {tuple(texts(drawn(lab, seed))) for seed in range(10)}
    assert len(others) == 10, f"expected ten loops of ten seeds, came {len(others)}"
    shuffled = any([p for p, _ in drawn(lab, s).rapid] != [0, 0, 1, 1, 2, 2, 3, 3]
                   for s in range(5))  # fmt: skip
    assert shuffled, "expected the rapid fire shuffled, came phase after phase in five loops"


def test_too_few_questions_is_loud(lab):
    """A loop that silently asks less scores a row that was not asked."""
    for phase, count in ((2, 1), (6, 1), (17, 0)):
        short = bank()
        short[phase] = short[phase][:count]
        refused(lambda short=short: drawn(lab, 0, short), f"{count} questions in phase {phase}")
        try:
            drawn(lab, 0, short)
        except ValueError as error:
            assert f"{phase:02d}" in str(error), (
                f"expected the phase, {phase:02d}, in the message, came {error}"
            )


def test_the_bank_is_the_courses(lab, tmp_path):
    """Only questions; a heading of another kind is none."""
    came = lab.load_bank(ROOT)
    same([phase for phase in range(15) if phase not in came], [], "phases 0 to 14 without any:")
    assert "What problem does PagedAttention solve, and how?" in came[2], (
        f"expected the first question of phase 02 without its number, came {came[2][:1]}"
    )
    pages = {phase: next(ROOT.glob(f"phase-{phase:02d}-*")) / "INTERVIEW.md" for phase in came}
    heads = {p: page.read_text(encoding="utf-8").count("\n## Q") for p, page in pages.items()}
    same({p: len(found) for p, found in came.items()}, heads, "questions of each phase:")
    bare = tmp_path / "phase-07-x" / "INTERVIEW.md"
    bare.parent.mkdir()
    bare.write_text("# x\n\n## Rapid fire\n", encoding="utf-8")
    same(lab.load_bank(tmp_path), {}, "a phase whose page has no question:")
    wrong = [text for found in came.values() for text in found if text.startswith(("Rapid", "Q"))]
    same(wrong, [], "texts that begin with Rapid or a number:")


def test_every_row_of_the_map_is_covered(lab):
    """A loop that never asks phases 12 to 17 cannot score hardware."""
    for seed in range(20):
        loop = drawn(lab, seed)
        phases = {phase for phase, *_ in (*loop.rapid, *loop.systems, *loop.breadth)}
        rows = lab.rows_of(phases) | set(loop.scenario["rows"])
        same(sorted(rows), sorted(lab.ROWS), f"seed {seed}, rows that are asked:")
