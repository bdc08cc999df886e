"""What lab 18-01 pins: the cap of a step, the wait from arrival, and a limit that is hard."""

from __future__ import annotations

import random

import pytest

from labkit import refused, same
from mini_vllm.scheduler import Scheduler

ROOMY = {"num_blocks": 512, "block_size": 16, "max_num_batched_tokens": 2048}
TIGHT = {"num_blocks": 10, "block_size": 4, "enable_prefix_caching": False, "max_num_seqs": 8}
"""Nine usable blocks: requests preempt one another."""


def chat(lab):
    """A decodes; B and C come one step later with long prompts that share nothing."""
    return [lab.Arrival(0, "hello", 24), lab.Arrival(1, "b" * 96, 2), lab.Arrival(1, "c" * 96, 2)]


def run(lab, arrivals, **knobs):
    return lab.simulate(arrivals, **(ROOMY | knobs))


@pytest.mark.parametrize(
    ("knobs", "spike", "steps", "ttfts"),
    [
        ({}, 193, 24, (1, 1, 1)),
        ({"long_prefill_token_threshold": 32}, 65, 24, (1, 3, 3)),
        ({"long_prefill_token_threshold": 16}, 33, 24, (1, 6, 6)),
        ({"max_num_batched_tokens": 40}, 40, 24, (1, 3, 5)),
        (
            {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 32},
            40, 24, (1, 3, 6),
        ),
        ({"max_num_seqs": 1}, 96, 28, (1, 24, 26)),
    ],
)  # fmt: skip
def test_worked_example(lab, knobs, spike, steps, ttfts):
    """A spike counted after the update, a wait counted from admission, a zero point off by one."""
    found = run(lab, chat(lab), **knobs)
    same(found.ttft_steps, ttfts, f"{knobs or 'free'}: steps to the first token of A, B, C")
    same(found.max_step_tokens, spike, f"{knobs or 'free'}: tokens of the fullest step")
    same(found.total_steps, steps, f"{knobs or 'free'}: steps until the last request ends")


def test_plans_of_a_budget(lab):
    """A step that leaves room while a prompt still lacks tokens."""
    found = run(lab, chat(lab), max_num_batched_tokens=40)
    same(found.step_tokens[:8], (5, 40, 40, 40, 40, 38, 2, 1), "tokens of the first eight steps")


def test_spike_threshold_is_per_request_budget_is_global(lab, record_property):
    """Two prompts in one step: a threshold bounds each of them, a budget their sum."""
    each = run(lab, chat(lab), long_prefill_token_threshold=32).max_step_tokens
    both = run(lab, chat(lab), max_num_batched_tokens=32).max_step_tokens
    same((each, both), (1 + 32 + 32, 32), "fullest step with threshold 32, and with budget 32")
    record_property("measured.spike", each)


def test_queueing_shows_up_in_ttft(lab, record_property):
    """One slot: what waits for it waits from its arrival on."""
    found = run(lab, chat(lab), max_num_seqs=1)
    same(found.ttft_steps[1:], (24, 26), "with one slot B waits for A's 24 tokens, C for B's 2")
    record_property("measured.queue", found.ttft_steps[1])


def test_ttft_is_measured_from_arrival(lab):
    """An idle server answers in the step of the arrival, whenever that is."""
    for step in (0, 1, 7):
        found = run(lab, [lab.Arrival(step, "abc", 1)])
        same(found.ttft_steps, (1,), f"an idle server, arrival before step {step}")
    same(
        [run(lab, [lab.Arrival(0, "b" * 96, 2)], long_prefill_token_threshold=t).total_steps
         for t in (0, 32, 16)],
        [2, 4, 7], "steps of a lone prompt of 96 with 2 outputs, at threshold 0, 32, 16",
    )  # fmt: skip


def test_a_gap_in_the_arrivals_counts(lab):
    """Steps in which the server is idle are part of the clock."""
    found = run(lab, [lab.Arrival(0, "ab", 2), lab.Arrival(6, "cd", 1)])
    same(found.step_tokens, (2, 1, 0, 0, 0, 0, 2), "tokens of each step, idle ones among them")
    same(found.total_steps, 7, "steps, idle ones among them")
    same(run(lab, [lab.Arrival(3, "ab", 1)]).step_tokens, (0, 0, 0, 2), "the first comes late")


def test_arrivals_in_any_order(lab):
    """Results stand in the list's order; those that are in are added in it, too."""
    late, early = lab.Arrival(2, "b" * 8, 1), lab.Arrival(0, "a" * 8, 4)
    same(run(lab, [late, early]).ttft_steps, (1, 1), "TTFT in the order of the list")
    first = [lab.Arrival(0, "a" * 8, 1), lab.Arrival(0, "b" * 5, 1)]
    same(run(lab, first, max_num_batched_tokens=8, max_num_seqs=8).ttft_steps, (1, 2), "in order")


def test_a_single_token_has_a_ttft(lab):
    """A request that ends in the step in which it begins."""
    found = run(lab, [lab.Arrival(0, "abcd", 1), lab.Arrival(0, "efgh", 1)])
    same((found.ttft_steps, found.total_steps), ((1, 1), 1), "two requests of one token each")


def test_every_token_is_counted_once(lab):
    """The model computes each prompt token, and each output but the last."""
    draw = random.Random(1)
    for _ in range(12):
        arrivals = [
            lab.Arrival(draw.randrange(6), chr(97 + i) * draw.randint(1, 60), draw.randint(1, 9))
            for i in range(draw.randint(1, 5))
        ]
        found = run(lab, arrivals, max_num_batched_tokens=draw.choice((16, 40, 500)),
                    max_num_seqs=8)  # fmt: skip
        wanted = sum(len(a.prompt) + a.max_tokens - 1 for a in arrivals)
        same(sum(found.step_tokens), wanted, f"tokens of all steps of {arrivals}")
        longest = max(a.step + a.max_tokens for a in arrivals)
        assert found.total_steps >= longest, (
            f"a request gets one token per step\nexpected at least {longest} steps\n"
            f"came     {found.total_steps}"
        )


def test_throughput_more_budget_never_more_steps(lab):
    """While blocks are plenty, more room in a step cannot cost steps."""
    draw = random.Random(2)
    for _ in range(15):
        arrivals = [
            lab.Arrival(draw.randrange(4), chr(97 + i) * draw.randint(1, 50), draw.randint(1, 6))
            for i in range(4)
        ]
        steps = [run(lab, arrivals, max_num_batched_tokens=b, max_num_seqs=4).total_steps
                 for b in (8, 16, 32, 64, 256)]  # fmt: skip
        assert steps == sorted(steps, reverse=True), f"budgets 8 to 256: came {steps} steps"


def test_more_budget_can_cost_steps_under_pressure(lab, record_property):
    """Nine blocks: an admission one step earlier preempts, and its tokens are computed again."""
    rows = ((0, 10, 4), (1, 16, 4), (2, 7, 9), (3, 15, 10), (5, 10, 10), (6, 24, 11))
    arrivals = [lab.Arrival(s, chr(97 + i) * p, o) for i, (s, p, o) in enumerate(rows)]
    found = [lab.simulate(arrivals, **TIGHT, max_num_batched_tokens=b) for b in (14, 17)]
    same([m.total_steps for m in found], [36, 37], "steps with a budget of 14, and of 17")
    same([sum(m.step_tokens) for m in found], [143, 157], "tokens: what is preempted runs twice")
    record_property("measured.pressure", "more steps")


def test_the_price_of_a_chunk(lab):
    """A decode stream that is longer than the prefill hides it; a shorter one does not."""
    for outputs, chunk, steps in ((5, 0, 5), (5, 32, 5), (5, 16, 8), (10, 16, 10), (24, 16, 24)):
        arrivals = [lab.Arrival(0, "hello", outputs), lab.Arrival(1, "b" * 96, 2)]
        found = run(lab, arrivals, long_prefill_token_threshold=chunk)
        same(found.total_steps, steps, f"a decoder of {outputs} outputs, threshold {chunk}")


@pytest.mark.parametrize(
    ("limit", "budget", "threshold", "worst"),
    [(300, 256, 0, 1), (193, 256, 0, 1), (100, 256, 32, 3), (65, 256, 32, 3), (64, 40, 0, 5),
     (40, 40, 0, 5)],
)  # fmt: skip
def test_grid_search_respects_the_slo(lab, limit, budget, threshold, worst):
    """A limit that is a penalty, or one that forbids what just keeps it."""
    knobs = {key: value for key, value in ROOMY.items() if key != "max_num_batched_tokens"}
    found = lab.grid_search(chat(lab), (40, 256, 2048), (0, 32), limit, max_num_seqs=8, **knobs)
    same((found.budget, found.threshold), (budget, threshold), f"(budget, threshold) under {limit}")
    same(found.metrics.worst_ttft, worst, "the worst TTFT of what was chosen")


def test_ties_go_to_the_first_of_the_grid(lab):
    """Two points that come to the same: the order of the grid decides, from iterators as well."""
    arrivals = [lab.Arrival(0, "abc", 3)]
    found = lab.grid_search(arrivals, iter((512, 64, 256)), iter((8, 0)), 99, max_num_seqs=4)
    same((found.budget, found.threshold), (512, 8), "all six points are equal: the first one")
    found = lab.grid_search(arrivals, (2, 64), iter((0,)), 99, max_num_seqs=2)
    same(found.budget, 64, "a budget below the prompt takes a step more")


def test_steps_come_before_ttft(lab):
    """A search that takes the shorter wait, when the objective begins with the number of steps."""
    rows = ((3, 54, 1), (0, 52, 3), (1, 4, 10))
    arrivals = [lab.Arrival(s, chr(97 + i) * p, o) for i, (s, p, o) in enumerate(rows)]
    found = lab.grid_search(arrivals, (24,), (0, 8), 99, max_num_seqs=4)
    came = (found.threshold, found.metrics.total_steps, found.metrics.worst_ttft)
    same(came, (8, 11, 7), "(threshold, steps, worst TTFT): the other point has 12 steps and 3")
    for rows, best, rank in (
        (((0, 20, 3), (3, 25, 2), (3, 40, 8)), (16, 0), (15, 5, 16)),
        (((0, 9, 7), (3, 28, 5), (3, 33, 5)), (16, 8), (12, 5, 16)),
    ):
        arrivals = [lab.Arrival(s, chr(97 + i) * p, o) for i, (s, p, o) in enumerate(rows)]
        found = lab.grid_search(arrivals, (64, 24, 16), (8, 0), 20, max_num_seqs=4)
        came = found.metrics
        same((found.budget, found.threshold), best, f"(budget, threshold) under 20 of {rows}")
        ranked = came.total_steps, came.worst_ttft, came.max_step_tokens
        same(ranked, rank, "its steps, worst TTFT and fullest step")


def test_unsatisfiable_slo_is_loud(lab):
    """The least bad point, given back as if it kept the limit."""
    try:
        found = lab.grid_search(chat(lab), (40, 256), (0, 32), 39, max_num_seqs=8)
    except ValueError as error:
        said = str(error)
    else:
        raise AssertionError(f"no point keeps 39: must raise ValueError; came {found}")
    assert "39" in said and "40" in said, (
        f"the message names the limit (39) and the smallest spike (40)\ncame     {said}"
    )
    try:
        lab.grid_search(chat(lab), (256,), (0, 16), 20, max_num_seqs=8)
    except ValueError as error:
        said = str(error)
    assert "33" in said, f"threshold 16 reaches a spike of 33, no budget does\ncame     {said}"


def test_what_is_refused(lab):
    """An empty list, a step before the clock, and a setting that the engine refuses."""
    refused(lambda: lab.simulate([]), "no arrivals")
    refused(lambda: lab.simulate([lab.Arrival(-1, "a", 1)]), "a step of -1")
    refused(lambda: lab.simulate([lab.Arrival(0, "a", 1)], max_num_seqs=0), "max_num_seqs=0")
    refused(lambda: lab.grid_search(chat(lab), (), (0,), 9), "a grid without a budget")


def test_the_probe_leaves_no_trace(lab):
    """A probe that patches the class counts the steps of other engines as well."""
    before = Scheduler.__dict__["schedule"]
    one, two = run(lab, chat(lab)), run(lab, chat(lab))
    assert Scheduler.__dict__["schedule"] is before, "Scheduler.schedule was replaced on the class"
    same(one, two, "the same run twice")
