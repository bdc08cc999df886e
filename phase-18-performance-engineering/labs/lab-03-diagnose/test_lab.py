"""What lab 18-03 pins: each answer is what the recording decides, and each fix is measured."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from labkit.modules import sibling

judging, starts = sibling(__file__, "judging"), sibling(__file__, "starts")
STARTS = Path(__file__).parent / "recordings" / "starts.jsonl.gz"
FILE = Path(__file__).parent / "recordings" / "cases.jsonl.gz"


@functools.cache
def recorded():
    """Three cases of each of nine kinds."""
    return judging.load(FILE)


@functools.cache
def recorded_starts():
    """Three starts of vLLM's CPU build, each beside a quicker one."""
    return starts.load(STARTS)


def tokens_twice(case):
    done = sum(sum(step["num_scheduled_tokens"].values()) for step in case["steps"])
    return done - sum(len(a["prompt_token_ids"]) + a["max_tokens"] - 1
                      for a in judging.adds(case).values())  # fmt: skip


def decided(case):
    """The request and the number, as the recording has them."""
    kind, subject, steps = case["case"], case["subject"], case["steps"]
    asked = judging.adds(case)
    plans = [step["num_scheduled_tokens"] for step in steps]
    if kind == "hits":
        alike = {name: judging.shared(asked[subject], add) for name, add in asked.items()}
        first = next(name for name in asked if alike[name])
        return first, alike[first]
    if kind == "queue":
        head = steps[judging.waits(case, subject)[0]]["waiting"][0]
        return head, -(-len(asked[head]["prompt_token_ids"]) // case["config"]["block_size"])
    if kind == "gaps":
        fullest = max((p for p in plans if p.get(subject) == 1), key=lambda p: sum(p.values()))
        return max(fullest, key=fullest.__getitem__), sum(fullest.values())
    if kind == "twice":
        return next(step["resumed"][0] for step in steps if step["resumed"]), tokens_twice(case)
    if kind == "adapters":
        waited = judging.waits(case, subject)
        return steps[waited[0]]["running"][0], len(waited)
    if kind == "alive":
        return steps[-1]["waiting"][0], next(k for k in range(len(plans)) if not any(plans[k:]))
    if kind == "rate":
        found = [s["num_computed_tokens"][name] - s["num_scheduled_tokens"][name]
                 for s in steps for name in s["resumed"]]  # fmt: skip
        return next(step["resumed"][0] for step in steps if step["resumed"]), sum(found)
    if kind == "counters":
        died = case["dashboard"]["died"]["step"]
        name = next(name for name, number in judging.first_tokens(case).items() if number == died)
        came = judging.admissions(case, name)
        return name, came[0][1] - came[-1][2]
    pairs = enumerate(zip(plans, (s["num_scheduled_tokens"] for s in case["later"]["steps"]),
                          strict=False))  # fmt: skip
    number, mine, theirs = next((k, a, b) for k, (a, b) in pairs if a != b)
    return next(name for name in mine if mine[name] != theirs.get(name)), number


def graded(lab, kind):
    """One kind: cause, request, number and fix on all of its cases."""
    for case in (each for each in recorded() if each["case"] == kind):
        where = f"case {kind!r}, seed {case['seed']}, subject {case['subject']}"
        came = getattr(lab, kind)(case)
        against = judging.contradiction(case, came.cause)
        assert not against, (
            f"{where}: the recording contradicts your cause {came.cause!r}\n{against}"
        )
        request, number = decided(case)
        assert came.request == request, (
            f"{where}: another request\nexpected {request}\ncame     {came.request}"
        )
        assert came.number == number, (
            f"{where}: another number\nexpected {number}\ncame     {came.number}"
        )
        assert len(came.fix) == 1, (
            f"{where}: turn one knob, or you know nothing of either\ncame     {came.fix}"
        )
        try:
            missed = judging.missed(case, judging.measure(case, **came.fix))
        except ValueError as error:
            missed = str(error)
        assert not missed, (
            f"{where}: with {came.fix} the simulator misses the goal {case['goal']}\n{missed}"
        )


def test_a_hit_rate_of_zero(lab):
    """Blocks are found whole: a beginning that is shorter than one is never found."""
    graded(lab, "hits")


def test_nothing_moves(lab, record_property):
    """Taken for a full batch or a used budget, when the first in the queue lacks room."""
    graded(lab, "queue")
    record_property("measured.queue", "the first in the queue needs more blocks than are free")


def test_a_stream_that_stalls(lab):
    """A threshold that bounds each prompt, when two come together."""
    graded(lab, "gaps")


def test_computed_twice(lab, record_property):
    """A step's tokens believed to be progress."""
    graded(lab, "twice")
    case = next(each for each in recorded() if each["case"] == "twice")
    record_property("measured.twice", tokens_twice(case))


def test_adapters_wait(lab):
    """A request that waits with a nearly empty server: its adapter has no slot."""
    graded(lab, "adapters")


def test_another_release(lab):
    """A difference looked for in the order of the queue, when it is a block that was kept."""
    graded(lab, "upgrade")


def test_up_and_not_alive(lab):
    """A server believed to be slow, or about to go on, since it answers /health."""
    graded(lab, "alive")


def test_a_hit_rate_of_random_prompts(lab):
    """Prompts suspected of being alike, when victims find their own blocks."""
    graded(lab, "rate")


def test_a_counter_that_falls(lab):
    """A load that failed or a prompt counted twice suspected, when two admissions are mixed."""
    graded(lab, "counters")


def test_a_start_that_takes_minutes(lab):
    """The weights suspected, which take a tenth of a second; or a phase that both starts have."""
    for case in recorded_starts():
        where = f"case 'start', seed {case['seed']}"
        came = lab.start(case)
        against = starts.contradiction(case, came.cause)
        assert not against, f"{where}: the starts contradict your cause {came.cause!r}\n{against}"
        expected = starts.spent(case["lines"], came.cause)
        assert (came.request, came.number) == expected, (
            f"{where}: another process or time\nexpected {expected}\n"
            f"came     {(came.request, came.number)}"
        )
        assert len(came.fix) == 1, f"{where}: turn one setting\ncame     {came.fix}"
        try:
            missed = starts.missed(case, starts.measure(case, **came.fix))
        except ValueError as error:
            missed = str(error)
        assert not missed, f"{where}: with {came.fix} the start misses its goal\n{missed}"


def test_a_start_has_one_cause(lab):
    """A pair of starts that two causes explain, or that no setting tells apart."""
    for case in recorded_starts():
        left = [cause for cause in starts.PHASES if not starts.contradiction(case, cause)]
        assert left == [lab.start(case).cause], f"seed {case['seed']}: the cause that is left"
        assert starts.missed(case, starts.measure(case)), f"seed {case['seed']}: it needs a fix"


@pytest.mark.parametrize(
    "kind", ["hits", "queue", "gaps", "twice", "adapters", "upgrade", "alive", "rate", "counters"]
)
def test_a_case_has_one_cause(lab, kind):
    """A case that two causes explain, and a simulator that decides otherwise than vLLM did."""
    for case in (each for each in recorded() if each["case"] == kind):
        where = f"case {kind!r}, seed {case['seed']}"
        left = [cause for cause in judging.CAUSES[kind] if not judging.contradiction(case, cause)]
        assert len(left) == 1, f"{where}: one cause must be left, came {left}"
        assert left[0] == getattr(lab, kind)(case).cause, f"{where}: the cause that is left"
        steps = [step["num_scheduled_tokens"] for step in case["steps"]]
        steps = [plan for plan in steps if plan]
        # The simulator refuses what never fits at the door. With the fix it plans as vLLM did up to
        # that request's last token, with which vLLM stood still.
        fix = getattr(lab, kind)(case).fix if kind == "alive" else {}
        plans = judging.measure(case, **fix).plans
        end = len(steps) - 1 if fix else None
        as_vllm = plans[:end] == steps[:-1] if fix else plans == steps
        assert as_vllm, f"{where}: with no knob turned the simulator plans as vLLM did"
        assert judging.missed(case, judging.measure(case)), f"{where}: the goal needs a fix"
