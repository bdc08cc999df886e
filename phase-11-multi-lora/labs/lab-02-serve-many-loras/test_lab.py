"""What lab 11-02 pins: a log is read, a slot's history replayed, a plan known beforehand."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path

import pytest

from labkit import refused, same
from labkit.modules import load_module

LOG = """\
(EngineCore pid=41) INFO 11-23 04:00:01 [punica_selector.py:20] Using PunicaWrapperGPU.
(EngineCore pid=41) INFO 11-23 04:00:03 [gpu_model_runner.py:5132] Model loading took 1.17 GiB \
memory and 2.534512 seconds
(EngineCore pid=41) INFO 11-23 04:00:09 [kv_cache_utils.py:1733] GPU KV cache size: 512,064 tokens
(EngineCore pid=41) DEBUG 11-23 04:00:10 [model_manager.py:1198] Adding lora. Model id: 1, int id: 1
(EngineCore pid=41) DEBUG 11-23 04:00:10 [model_manager.py:306] Activating LoRA. int id: 1, slot \
index: 0
(EngineCore pid=41) INFO 11-23 04:00:10 [loggers.py:271] Running: 2 reqs, Waiting: 1 reqs
(EngineCore pid=41) DEBUG 11-23 04:00:11 [model_manager.py:1198] Adding lora. Model id: 12, \
int id: 12
(EngineCore pid=41) DEBUG 11-23 04:00:11 [model_manager.py:306] Activating LoRA. int id: 12, slot \
index: 1
(EngineCore pid=41) DEBUG 11-23 04:00:12 [model_manager.py:59] Removing adapter int id: 1
(EngineCore pid=41) DEBUG 11-23 04:00:12 [model_manager.py:306] Activating LoRA. int id: 3, slot \
index: 0
"""
PROMPTS = ["The KV cache", "A block", "def f(x):", "one two"]


def keyerror(call, what):
    """Assert that a call raises KeyError; anything else is told in one line."""
    try:
        came = repr(call())
    except KeyError:
        return
    except Exception as error:
        came = repr(error)
    raise AssertionError(f"{what}: must raise KeyError, not guess (R1)\ncame     {came}")


# --- the log --------------------------------------------------------------------------------------


def test_values_of_a_start(lab):
    for name, expected in (
        ("backend", "PunicaWrapperGPU"), ("model_gib", 1.17), ("load_seconds", 2.534512),
        ("kv_tokens", 512_064),
    ):  # fmt: skip
        came = lab.log_value(LOG, name)
        same(came, expected, f"log_value(LOG, {name!r})")
        same(type(came).__name__, type(expected).__name__, f"the type of {name}")


def test_newer_lines_and_restarts(lab):
    newer = "INFO Model loading took 12.5 GiB and 31.000000 seconds\n"
    same(lab.log_value(newer, "model_gib"), 12.5, 'a line without the word "memory"')
    same(lab.log_value(newer, "load_seconds"), 31.0, "and its seconds")
    moved = LOG + "INFO Using PunicaWrapperCPU.\n"
    same(lab.log_value(moved, "backend"), "PunicaWrapperCPU", "started again, on a processor")
    same(
        lab.log_value(LOG + "INFO GPU KV cache size: 96 tokens\n", "kv_tokens"),
        96,
        "an engine that was started again in the same log: the last line counts",
    )


def test_a_missing_line_is_an_error(lab):
    for name in ("backend", "model_gib", "load_seconds", "kv_tokens"):
        keyerror(
            lambda name=name: lab.log_value("INFO nothing of interest\n", name),
            f"{name} of a log without it",
        )
    keyerror(lambda: lab.log_value(LOG, "hit_rate"), "hit_rate: no line of vLLM has it")


def test_events_of_adapters(lab):
    same(
        lab.slot_events(LOG),
        [
            lab.Event("read", 1),
            lab.Event("activate", 1, 0),
            lab.Event("read", 12),
            lab.Event("activate", 12, 1),
            lab.Event("remove", 1),
            lab.Event("activate", 3, 0),
        ],
        "the lines about adapters, in the order of the log, and nothing of the other lines",
    )
    same(lab.slot_events(""), [], "an empty log")


# --- the slots ------------------------------------------------------------------------------------


def test_slots_are_replayed(lab):
    same(lab.slots_after(lab.slot_events(LOG), 2), [3, 12], "1 in 0, 12 in 1, 1 out, 3 in 0")
    same(lab.slots_after([], 3), [None, None, None], "nothing has happened")
    events = [lab.Event("read", 5), lab.Event("remove", 5), lab.Event("activate", 6, 1)]
    same(
        lab.slots_after(events, 2),
        [None, 6],
        "5 was read and thrown out of memory, and never stood in a slot",
    )
    rng = random.Random(2)
    for _ in range(40):
        slots, events = [None] * 4, []
        for _ in range(30):
            place = rng.randrange(4)
            if slots[place] is not None:
                events.append(lab.Event("remove", slots[place]))
            if rng.random() < 0.3:
                slots[place] = None
                continue
            new = rng.choice([n for n in range(1, 12) if n not in slots])
            events += [lab.Event("read", new), lab.Event("activate", new, place)]
            slots[place] = new
        same(lab.slots_after(events, 4), slots, f"a random history: {events[-4:]} at its end (R2)")


def test_a_log_that_contradicts_itself(lab):
    for events, why in (
        ([("activate", 1, 0), ("activate", 2, 0)], "slot 0 is taken by 1, and nobody removed it"),
        ([("activate", 1, 2)], "there is no slot 2 of 2"),
        ([("activate", 1, 0), ("activate", 1, 1)], "1 stands in slot 0 already"),
    ):
        refused(
            lambda events=events: lab.slots_after([lab.Event(*each) for each in events], 2),
            f"{events}: {why} (R2)",
        )


# --- the texts ------------------------------------------------------------------------------------


def test_first_divergence(lab):
    for one, other, expected in (
        ([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0), ([], [], None),
        ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1], 1),
    ):  # fmt: skip
        same(lab.first_divergence(one, other), expected, f"first_divergence({one}, {other})")


# --- the engine -----------------------------------------------------------------------------------


def test_one_slot_serves_in_turns(lab, record_property):
    trace = lab.run_mini(PROMPTS, ["shout", "quote", "shout", None], 1, 2)
    same(
        (trace.plans, trace.finished),
        ([[0, 2, 3], [0, 2, 3], [1], [1]], [0, 2, 3, 1]),
        "one slot, shout, quote, shout, base: quote is passed over until no shout runs (R3)",
    )
    who = ["shout", "quote", "code", "quote", None, "shout"]
    trace = lab.run_mini([*PROMPTS, "a", "b"], who, 1, 2)
    same(
        trace.plans,
        [[0, 4, 5], [0, 4, 5], [1, 3], [1, 3], [2], [2]],
        f"{who} on one slot: three turns, and the base goes with the first",
    )
    record_property("measured.turns", len(trace.plans))


def test_with_a_slot_for_each_all_run_at_once(lab):
    trace = lab.run_mini(PROMPTS, ["shout", "quote", "code", None], 3, 3)
    same(trace.plans, [[0, 1, 2, 3]] * 3, "three slots for three adapters, and the base needs none")
    two = lab.run_mini(PROMPTS, ["shout", "quote", "code", None], 2, 3)
    same(two.plans, [[0, 1, 3]] * 3 + [[2]] * 3, "two slots: code waits for a turn of its own")
    same(two.texts, trace.texts, "and the texts are the same, whoever ran beside them")


def test_behaviour_follows_the_adapter(lab):
    prompt = ["The scheduler"] * 4
    trace = lab.run_mini(prompt, ["shout", None, "quote", "code"], 3, 12)
    same([len(text) for text in trace.texts], [12] * 4, "tokens of each text")
    same(
        len(set(map(tuple, trace.texts))), 4, "one prompt, three adapters and the base: four texts"
    )
    swapped = lab.run_mini(prompt, ["quote", "code", "shout", None], 3, 12)
    same(
        [swapped.texts[place] for place in (2, 3, 0, 1)],
        trace.texts,
        "the same with the adapters in another order: the text goes with the adapter",
    )


def test_requests_are_checked(lab):
    refused(lambda: lab.run_mini(PROMPTS, ["shout"], 1), "four prompts, one adapter")
    refused(lambda: lab.run_mini(["a"], ["polite"], 1), "an adapter that is not shipped")


@pytest.mark.gpu
def test_an_adapter_without_b_is_the_base(lab, gpu_device):
    """What run.py does on a GPU; here as three questions to one engine."""
    run = load_module(Path(__file__).with_name("run.py"))
    batches = {"mixed": run.MIXED, "swapped": run.SWAPPED, "base": (run.MIXED[0], [None] * 4)}
    batches["zero"] = (run.MIXED[0], ["zero"] * 4)
    came = run.launch(Namespace(util=0.5), 5, 8, batches).needed()
    same(came["zero"]["texts"], came["base"]["texts"], "an adapter with B = 0 adds nothing")
    for one, other in zip(came["mixed"]["texts"], came["swapped"]["texts"], strict=True):
        assert lab.first_divergence(one, other) is not None, (
            f"the same prompt under another adapter: expected another text; came {one} twice"
        )
