"""Step records: exact values of one small workload, and no effect on decisions."""

from __future__ import annotations

import json

from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.observe.trace import traced_steps
from mini_vllm.tests.support import ScriptedModel

EOS = 256


def small_engine() -> LLMEngine:
    """Budget 6, blocks of 4; eight prompt tokens are followed by 1, 1, EOS."""
    model = ScriptedModel(lambda _, position: EOS if position == 9 else 1)
    return LLMEngine(
        num_blocks=9, block_size=4, max_num_seqs=2, max_num_batched_tokens=6, model=model
    )


def test_a_record_shows_state_between_schedule_and_update():
    engine = small_engine()
    engine.add_request("abcdefgh", SamplingParams(max_tokens=5), request_id="A")
    records = list(traced_steps(engine))
    assert [r.num_scheduled_tokens for r in records] == [{"A": 6}, {"A": 2}, {"A": 1}, {"A": 1}]
    assert [r.num_computed_tokens for r in records] == [{"A": 0}, {"A": 6}, {"A": 8}, {"A": 9}]
    assert [r.sampled for r in records] == [{}, {"A": 1}, {"A": 1}, {"A": EOS}]
    assert [r.block_ids for r in records] == [{"A": [1, 2]}] * 2 + [{"A": [1, 2, 3]}] * 2
    assert [r.free_blocks for r in records] == [6, 6, 5, 5]
    assert [r.step for r in records] == [0, 1, 2, 3]
    assert [r.new for r in records] == [["A"], [], [], []]
    assert [r.finished for r in records] == [{}, {}, {}, {"A": "stop"}]
    assert all(r.running == ["A"] and r.waiting == [] for r in records)


def test_hits_preemptions_and_resumes_are_recorded():
    """A takes one of B's two freed blocks; the other still holds B's first four tokens."""
    engine = LLMEngine(num_blocks=5, block_size=4, model="toy")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request("a" * 8, params, request_id="A")
    engine.add_request("b" * 8, params, request_id="B")
    records = list(traced_steps(engine))
    assert [r.preempted for r in records if r.preempted] == [["B"]]
    (resumed,) = [r for r in records if r.resumed]
    assert resumed.resumed == ["B"]
    assert resumed.num_cached_tokens == {"B": 4}
    assert resumed.num_scheduled_tokens == {"B": 5}


def test_tracing_changes_no_output_and_restores_the_callback():
    params = SamplingParams(max_tokens=4)
    plain = LLMEngine(model="toy").generate(["abc", "abd"], params)
    engine = LLMEngine(model="toy")
    seen: list[object] = []
    callback = seen.append
    engine.observers.append(callback)
    ids = [engine.add_request(prompt, params) for prompt in ("abc", "abd")]
    requests = [engine.requests[request_id] for request_id in ids]
    records = list(traced_steps(engine))
    assert [r.output_token_ids for r in requests] == [r.outputs[0].token_ids for r in plain]
    assert engine.observers == [callback]
    assert len(seen) == len(records), "the callback that was there before still runs"


def test_requests_may_join_between_two_records():
    engine = LLMEngine(model="toy")
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    engine.add_request("a", params, request_id="A")
    admitted = []
    for record in traced_steps(engine):
        admitted.append(record.new)
        if record.step == 0:
            engine.add_request("b", params, request_id="B")
    assert admitted == [["A"], ["B"], []]


def test_a_record_is_json():
    engine = small_engine()
    engine.add_request("ab", SamplingParams(max_tokens=1), request_id="A")
    (record,) = traced_steps(engine)
    loaded = json.loads(json.dumps(record.to_json()))
    assert loaded["num_scheduled_tokens"] == {"A": 2}
    assert loaded["finished"] == {"A": "length"}
