"""What lab 15-06 pins: what counters prove of a decoder, and what they do not.

`recordings/windows.jsonl.gz`: ten windows by name and 240 random ones, on v0.22.1's own scheduler
(`conformance/features/kv_transfer/decoder.py`). `computed` is read from its plans, token by token.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from conformance.real_core import core_of, why_not
from labkit import same, shipped_model
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.kv_transfer.simulated import SimulatedNetwork

FILE = Path(__file__).parent / "recordings" / "windows.jsonl.gz"


@cache
def recorded():
    with gzip.open(FILE, "rt") as file:
        return [json.loads(line) for line in file]


def named():
    return {w["name"]: w for w in recorded() if not w["name"].startswith("seed")}


def shown(window):
    seen = window["seen"]
    return (
        f"{window['name']}: {len(seen['prompt_lengths'])} prompts of {seen['prompt_lengths']}, "
        f"blocks of {seen['block_size']}\n  {seen['prompt_tokens_by_source']}, preemptions "
        f"{seen['num_preemptions']}, affected {seen['affected']}"
    )


def kind(window):
    seen = window["seen"]
    many = len(seen["prompt_lengths"]) > 1
    return many, bool(seen["affected"]), bool(seen["num_preemptions"])


def exact(lab, windows):
    for window in windows:
        low, high = lab.computed_bounds(window["seen"])
        assert (low, high) == (window["computed"],) * 2, (
            f"{shown(window)}\nexpected {window['computed']} and {window['computed']}: so many "
            f"prompt tokens stood in plans (D2)\ncame     {low} and {high}"
        )


def test_worked_example(lab):
    """A whole move taken for no computation, and a rounded one for a whole."""
    exact(
        lab, [named()[n] for n in ("all of it moved", "whole blocks moved", "nothing was offered")]
    )


def test_one_request(lab):
    """Tokens of D's own cache, or the last token of a prompt, counted as computed or not at all."""
    windows = [w for w in recorded() if kind(w) == (False, False, False)]
    assert len(windows) > 90, "windows of one request"
    exact(lab, windows)


def test_one_request_whose_load_failed(lab, record_property):
    """A counter believed that was written before the load ended."""
    windows = [w for w in recorded() if kind(w) == (False, True, False)]
    assert len(windows) > 30, "windows of one request whose load failed"
    exact(lab, windows)
    middle = named()["a block in the middle failed"]
    record_property("measured.lie", middle["seen"]["prompt_tokens_by_source"]["local_compute"])


def test_several_requests(lab):
    """A sum read as if it were one request: how many of them needed a last token?"""
    windows = [w for w in recorded() if kind(w) == (True, False, False)]
    assert len(windows) > 50, "windows of several requests"
    for window in windows:
        low, high = lab.computed_bounds(window["seen"])
        count = len(window["seen"]["prompt_lengths"])
        assert low <= window["computed"] <= high, (
            f"{shown(window)}\nexpected {window['computed']} within (D1)\ncame     {low} to {high}"
        )
        wide = count - 1 if window["seen"]["prompt_tokens_by_source"]["local_compute"] else 0
        assert high - low <= wide, (
            f"{shown(window)}\nexpected at most {wide} apart (D3)\ncame     {low} to {high}"
        )


def test_what_widens_the_bounds(lab):
    """A certainty that the counters do not give: failed loads of several, preemptions."""
    windows = [w for w in recorded() if kind(w)[2] or kind(w) == (True, True, False)]
    assert len(windows) > 40, "windows with a preemption, or several requests and failed loads"
    for window in windows:
        seen = window["seen"]
        low, high = lab.computed_bounds(seen)
        assert low <= window["computed"] <= high, (
            f"{shown(window)}\nexpected {window['computed']} within (D1)\ncame     {low} to {high}"
        )
        wide = len(seen["prompt_lengths"]) - 1 + seen["affected"]
        wide += seen["num_preemptions"] * sum(seen["prompt_lengths"])
        assert high - low <= wide, (
            f"{shown(window)}\nexpected at most {wide} apart (D4)\ncame     {low} to {high}"
        )


def test_the_verdict(lab, record_property):
    """A "no" that was not proved, or a "cannot say" where it was."""
    said = {"no": 0, "yes": 0, "cannot say": 0}
    for window in recorded():
        verdict = lab.prefills_again(window["seen"])
        assert verdict in said, f"expected one of {list(said)}; came {verdict!r}"
        said[verdict] += 1
        count = len(window["seen"]["prompt_lengths"])
        truth = "yes" if window["computed"] > count else "no"
        assert verdict in (truth, "cannot say"), (
            f"{shown(window)}\n{window['computed']} prompt tokens were computed for {count} "
            f"prompts: {truth}\ncame     {verdict}"
        )
        if verdict == "cannot say":
            many, failed, preempted = kind(window)
            local = window["seen"]["prompt_tokens_by_source"]["local_compute"]
            is_told = local > count or not (preempted or (many and (failed or local)))
            assert not is_told, f"{shown(window)}\nthis window says it: {truth}"
    assert min(said.values()) > 0, f"verdicts of 250 windows: {said}"
    record_property("measured.undecided", said["cannot say"])


def test_the_cause(lab):
    """A cause that the recording contradicts."""
    alone = [window for window in recorded() if len(window["seen"]["prompt_lengths"]) == 1]
    for window in alone:
        seen, (offered,) = window["seen"], window["offered"]
        (length,), size = seen["prompt_lengths"], seen["block_size"]
        hits, missing = seen["prompt_tokens_by_source"]["local_cache_hit"], length - offered
        told = f"the connector has {offered} of {length} tokens"
        computed = f"{window['computed']} tokens of the prompt stood in plans"
        whole = offered > 0 and offered % size == 0 and 0 < missing < size
        failed = f"{seen['affected']} tokens were affected by a failed load"
        against = {
            "moved": "" if window["computed"] == 1 else computed,
            "not-offered": "" if not offered and not hits else f"{told}, and D had {hits}",
            "cached-here": "" if hits and not offered else f"{told}, and D had {hits}",
            "rounded": "" if whole else told,
            "offered-in-part": "" if offered > 0 and missing >= size else told,
            "failed": "" if seen["affected"] else failed,
            "preempted": "" if seen["num_preemptions"] else "nothing was preempted",
        }
        if not seen["affected"] and offered == length and window["computed"] > 1:
            against["moved"] = computed
        left = [name for name, said in against.items() if not said]
        if window["name"] not in named() and (len(left) != 1 or 0 < offered <= hits):
            continue  # by chance two causes explain it, or the connector had what D had
        came = lab.cause(seen)
        assert came in against, f"expected one of {list(lab.CAUSES)}; came {came!r}"
        assert not against[came], (
            f"{shown(window)}\nthe recording contradicts {came!r}: {against[came]}"
        )
        same(left, [came], f"{window['name']}: causes that nothing contradicts")


def test_on_the_engines_own_pair(lab):
    """Bounds that hold in a file and nowhere else: two engines, K and V over a simulated wire."""
    network, engines = SimulatedNetwork(), []
    for role in ("kv_producer", "kv_consumer"):
        config = {
            "kv_connector": "SimulatedConnector", "kv_role": role,
            "kv_connector_extra_config": {"network": network},
        }  # fmt: skip
        engines.append(LLMEngine(shipped_model(), num_blocks=24, block_size=4, dtype="float64",
                                 kv_transfer_config=config))  # fmt: skip
    p, d = engines
    prompts, computed = {"a": "hello world", "b": "hello woods and more"}, []
    for name, text in prompts.items():
        one = SamplingParams(max_tokens=1, ignore_eos=True)
        p.add_request(text, one, request_id=name, kv_transfer_params={"do_remote_decode": True})
    lengths = {name: len(text) for name, text in prompts.items()}
    d.observers.append(lambda plan: computed.extend(
        max(0, min(plan.num_computed_tokens[n] + c, lengths[n]) - plan.num_computed_tokens[n])
        for n, c in plan.num_scheduled_tokens.items()
    ))  # fmt: skip
    waiting, hits = set(prompts), 0
    for _ in range(60):
        for engine in (p, d):
            if engine.has_unfinished_requests():
                engine.step()
        network.tick()
        for name in sorted(waiting):
            if params := p.feature("kv_transfer").take_kv_transfer_params(name):
                wish = SamplingParams(max_tokens=3, ignore_eos=True)
                d.add_request(
                    prompts[name], wish, request_id=name, kv_transfer_params=params,
                )  # fmt: skip
                waiting.discard(name)
    hits = d.scheduler.kv.stats.hits
    moved = d.feature("kv_transfer").stats()["num_external_tokens"]
    seen = {
        "block_size": 4, "prompt_lengths": list(lengths.values()), "num_preemptions": 0,
        "affected": 0,
        "prompt_tokens_by_source": {
            "local_compute": sum(lengths.values()) - moved - hits, "local_cache_hit": hits,
            "external_kv_transfer": moved,
        },
    }  # fmt: skip
    low, high = lab.computed_bounds(seen)
    assert low <= sum(computed) <= high, (
        f"{seen}\nexpected {sum(computed)}\ncame     {low} to {high}"
    )
    same(
        lab.prefills_again(seen), "no", f"the mini engine's pair moved all of both prompts: {seen}"
    )


@pytest.mark.skipif(bool(why_not()), reason="no pinned tree: course upstream fetch")
def test_the_windows_are_what_the_pinned_scheduler_does(lab):
    """A file that says what the release does not."""
    from conformance.features.kv_transfer import decoder

    for name, window in named().items():
        again = decoder.window_of(decoder.named(decoder.NAMED[name]), core_of())
        same({"name": name, **again}, window, f"{name!r}, recorded anew")
        low, high = lab.computed_bounds(again["seen"])
        assert low <= again["computed"] <= high, f"{name!r}: {low} to {high}"
