"""Workloads by hand, beside the real scheduler, release beside release, and shrunk."""

from __future__ import annotations

import copy

import pytest

from conformance import decisions, replay, workload_file, workloads
from conformance.ask import ask, lines, plan_of
from conformance.real_core import core_of, why_not
from conformance.recorders import combined
from conformance.shrink import shrink
from mini_vllm.block_pool import BlockPool

needs_pin = pytest.mark.skipif(bool(why_not()), reason=why_not())
PRIORITY = """
config: {num_blocks: 6, policy: priority, max_num_seqs: 4, max_num_batched_tokens: 16}
requests:
- {id: A, prompt: 11, max_tokens: 5, priority: 9}
- {id: B, prompt: 4, max_tokens: 6, step: 1}
- {id: C, prompt: 3, max_tokens: 6, step: 1, priority: 1}
"""


def needs(*versions):
    reasons = [problem for version in versions if (problem := why_not(version))]
    return pytest.mark.skipif(bool(reasons), reason="; ".join(reasons))


# ------------------------------------------------------------------ workloads by hand


def test_the_short_form_fills_in_what_is_left_out():
    made = workload_file.parse(PRIORITY)
    assert made["config"] == {
        **workload_file.CONFIG, "num_blocks": 6, "policy": "priority", "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }  # fmt: skip
    assert [event["step"] for event in made["events"]] == [0, 1]
    first = made["events"][0]["add"][0]
    assert first["prompt_token_ids"] == list(range(1000, 1011))
    assert made["outputs"]["A"] == [workload_file.SAYS] * 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_the_short_form_of_a_workload_reads_back_as_the_same_workload(seed):
    made = combined.generate(seed)
    again = workload_file.parse(workload_file.shorten(made))
    for key in ("config", "eos_token_id"):
        assert again[key] == made[key]
    adds = [[(e["step"], a) for e in w["events"] for a in e["add"]] for w in (made, again)]
    for (step, one), (other_step, other) in zip(*adds, strict=True):
        assert step == other_step
        assert {k: v for k, v in one.items() if v} == {k: v for k, v in other.items() if v}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("config: {num_blox: 6}\nrequests: [{id: A, prompt: 3}]", "config.num_blox: unknown"),
        ("requests: [{id: A, promt: 3}]", r"requests\[0\].promt: unknown"),
        ("requests: [{id: A, prompt: 0}]", "prompt_token_ids=0 is not token ids"),
        ("requests: [{id: A, prompt: 3, step: -1}]", r"requests\[0\].step=-1"),
        ("requests: [{id: A, prompt: 3}, {id: A, prompt: 3}]", "another request has it"),
        ("config: {policy: lifo}\nrequests: [{id: A, prompt: 3}]", "policy=lifo is not fcfs"),
        ("requests: []", "at least one"),
        ("[1, 2]", "need an object"),
        ("{", "not YAML"),
    ],
)
def test_a_workload_that_cannot_be_read_says_what_is_accepted(text, problem):
    with pytest.raises(workload_file.WorkloadError, match=problem):
        workload_file.parse(text)


def test_a_seed_is_a_workload_and_a_missing_file_is_named():
    assert workload_file.read("17") == workloads.generate(17)
    with pytest.raises(workload_file.WorkloadError, match=r"no\.yaml: .*need a seed, FILE"):
        workload_file.read("no.yaml")


# ------------------------------------------------------------------ beside the real one


@needs_pin
def test_both_schedulers_are_shown_and_agree():
    answer = ask(workload_file.parse(PRIORITY), core_of())
    assert answer.difference is None
    text = list(lines(answer, "vLLM 0.22.1", "mini_vllm"))
    assert text[3].split() == ["2", "nothing;", "preempts", "A", "the", "same"]
    assert text[-1] == "11 steps, every field of each: the same."


class Backwards(BlockPool):
    """Hands out blocks from the wrong end."""

    def get_new_blocks(self, num_blocks):
        return super().get_new_blocks(num_blocks)[::-1]


@needs_pin
def test_a_learners_part_that_differs_is_shown_at_its_first_difference():
    def build(config):
        return replay.mini_scheduler(config, block_pool=Backwards)

    answer = ask(workload_file.parse(PRIORITY), core_of(), build)
    assert answer.difference is not None
    text = list(lines(answer, "vLLM 0.22.1", "yours"))
    assert text[1].endswith("<- block_ids")
    assert "which blocks each request holds" in text[-3]
    assert text[-2].split()[-3:] == ["[1,", "2,", "3]}"]
    assert text[-1].split()[-3:] == ["[3,", "2,", "1]}"]


@needs_pin
def test_a_request_that_can_never_be_scheduled_is_said():
    made = workload_file.parse("config: {num_blocks: 2}\nrequests: [{id: A, prompt: 30}]")
    assert "stands still" in ask(made, core_of()).fault


def test_a_plan_in_a_line():
    step = {"num_scheduled_tokens": {"A": 3, "B": 1}, "preempted": ["C"], "finished": ["B"]}
    assert plan_of(step) == "A 3, B 1; preempts C; ends B"


# ------------------------------------------------------------------ two releases


def test_where_two_decisions_part_is_the_first_step_and_field():
    one = [{"running": ["A"], "free_blocks": 3}, {"running": ["A"], "free_blocks": 3}]
    other = copy.deepcopy(one)
    assert decisions.parting(one, other) is None
    other[1]["free_blocks"] = 2
    assert decisions.parting(one, other) == decisions.Parting(1, "free_blocks", 3, 2)


def test_a_field_that_only_one_release_has_is_not_compared():
    assert decisions.parting([{"skipped": {}}], [{}]) is None


def test_the_order_in_which_requests_are_scheduled_is_a_decision():
    one = [{"num_scheduled_tokens": {"A": 1, "B": 1}}]
    other = [{"num_scheduled_tokens": {"B": 1, "A": 1}}]
    assert decisions.parting(one, other).field == "num_scheduled_tokens"


def test_a_fault_of_one_release_is_where_they_part():
    step = {"running": ["A"]}
    parts = decisions.parting([step, step], [step, {"fault": "AssertionError"}])
    assert parts == decisions.Parting(1, "fault", None, "AssertionError")


@pytest.mark.slow
@needs("0.22.1", "0.33.0")
def test_the_smallest_workload_for_the_lone_request_is_one_request():
    one, other = core_of("0.22.1"), core_of("0.33.0")
    for seed in range(200):
        found = decisions.differ(workloads.generate(seed), one, other, decisions.DECISIONS)
        if found and found.field == "num_scheduled_tokens":
            break
    made, parts = decisions.smallest(seed, frozenset(), one, other, "num_scheduled_tokens")
    adds = [add for event in made["events"] for add in event["add"]]
    threshold = made["config"]["long_prefill_token_threshold"]
    assert len(adds) == 1
    assert len(adds[0]["prompt_token_ids"]) == threshold + 1
    assert [*parts.one.values(), *parts.other.values()] == [threshold, threshold + 1]


@pytest.mark.slow
@needs("0.22.1", "0.23.0")
def test_0_23_0_decides_plain_workloads_as_the_pin_does():
    one, other = core_of("0.22.1"), core_of("0.23.0")
    plain = next(decisions.survey(one, other, 90))
    assert (plain.num_workloads, plain.by_field, plain.num_labels) == (90, {}, 0)


# ------------------------------------------------------------------ shrinking


def test_a_workload_shrinks_to_what_shows_it():
    def shows(workload):
        adds = [add for event in workload["events"] for add in event["add"]]
        return sum(len(add["prompt_token_ids"]) for add in adds) >= 10

    made = shrink(workloads.generate(3), shows)
    adds = [add for event in made["events"] for add in event["add"]]
    assert sum(len(add["prompt_token_ids"]) for add in adds) == 10
    assert {add["max_tokens"] for add in adds} == {1}
    assert made["config"]["policy"] == "fcfs"


def test_what_does_not_show_it_is_not_shrunk():
    with pytest.raises(ValueError, match="does not show"):
        shrink(workloads.generate(3), lambda workload: False)


def test_shrinking_leaves_the_given_workload_as_it_was():
    given = workloads.generate(5)
    shrink(given, lambda workload: True, tries=50)
    assert given == workloads.generate(5)
