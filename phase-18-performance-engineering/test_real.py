"""What the labs of phase 18 say of vLLM, run on the pinned release's own scheduler, without torch.

Without the pinned tree these tests are skipped: `course upstream fetch`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.features.simulate import cases
from conformance.real_core import core_of, why_not
from conformance.recorders.run import run
from labkit.modules import load_module

LABS = Path(__file__).parent / "labs"
CHAT = ((0, 5, 24), (1, 96, 2), (1, 96, 2))
TIGHT = ((0, 10, 4), (1, 16, 4), (2, 7, 9), (3, 15, 10), (5, 10, 10), (6, 24, 11))
"""Arrival step, prompt tokens, outputs."""
ROOMY = {
    "num_blocks": 512, "block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 128,
    "long_prefill_token_threshold": 0, "enable_prefix_caching": True,
    "enable_chunked_prefill": True, "max_model_len": 2048, "policy": "fcfs",
}  # fmt: skip
SMALL = {"num_blocks": 10, "block_size": 4, "enable_prefix_caching": False, "max_num_seqs": 8}


def served(rows, **knobs):
    """Tokens of each step, and the steps to each first token, on vLLM's scheduler."""
    events = {}
    for place, (step, prompt, outputs) in enumerate(rows):
        add = {
            "request_id": str(place), "prompt_token_ids": [100 + place] * prompt,
            "max_tokens": outputs, "priority": 0, "arrival_time": float(step), "ignore_eos": True,
        }  # fmt: skip
        events.setdefault(step, {"step": step, "abort": [], "add": []})["add"].append(add)
    entry = run(
        {"seed": 1, "eos_token_id": 2, "config": ROOMY | knobs, "events": list(events.values()),
         "outputs": {str(place): [7] * rows[place][2] for place in range(len(rows))}},
        core_of(),
    )  # fmt: skip
    computed, first = dict.fromkeys(map(str, range(len(rows))), 0), {}
    for number, step in enumerate(entry["steps"]):
        for name, count in step["num_scheduled_tokens"].items():
            computed[name] += count
            if name not in first and computed[name] >= rows[int(name)][1]:
                first[name] = number - rows[int(name)][0] + 1
    tokens = tuple(sum(step["num_scheduled_tokens"].values()) for step in entry["steps"])
    return tokens, tuple(first[str(place)] for place in range(len(rows)))


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("rows", "knobs"),
    [
        (CHAT, {}),
        (CHAT, {"long_prefill_token_threshold": 32}),
        (CHAT, {"long_prefill_token_threshold": 16}),
        (CHAT, {"max_num_batched_tokens": 40, "max_num_seqs": 8}),
        (
            CHAT,
            {
                "max_num_batched_tokens": 40,
                "long_prefill_token_threshold": 32,
                "max_num_seqs": 8,
            },
        ),
        (CHAT, {"max_num_seqs": 1}),
        (TIGHT, {**SMALL, "max_num_batched_tokens": 14}),
        (TIGHT, {**SMALL, "max_num_batched_tokens": 17}),
    ],
)
def test_lab_01_counts_as_vllm_plans(rows, knobs):
    lab = load_module(LABS / "lab-01-tune-the-knobs" / "solution.py")
    arrivals = [lab.Arrival(s, chr(97 + i) * p, o) for i, (s, p, o) in enumerate(rows)]
    known = ("num_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs",
             "long_prefill_token_threshold", "enable_prefix_caching")  # fmt: skip
    settings = {name: value for name, value in (ROOMY | knobs).items() if name in known}
    found = lab.simulate(arrivals, **settings)
    tokens, firsts = served(rows, **knobs)
    assert found.step_tokens == tokens
    if rows is CHAT:  # under pressure a request is computed again, which `firsts` cannot tell
        assert found.ttft_steps == firsts


@pytest.mark.parametrize("kind", cases.KINDS)
def test_the_cases_of_lab_03_are_what_the_schedulers_decide(kind):
    asked = {"upgrade": cases.LATER, "rate": cases.COUNTS_ALL, "counters": cases.FALLS}
    if reason := why_not() or (kind in asked and why_not(asked[kind])):
        pytest.skip(reason)
    if kind == "counters":
        pytest.importorskip("prometheus_client", reason="it refuses a counter that falls")
    folder = LABS / "lab-03-diagnose"
    kept = load_module(folder / "judging.py").load(folder / "recordings" / "cases.jsonl.gz")
    case = next(each for each in kept if each["case"] == kind)
    assert json.loads(json.dumps(cases.MAKE[kind](case["seed"]))) == case
