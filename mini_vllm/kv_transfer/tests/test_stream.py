"""A producer whose layers are read while it computes: what has come when, and what may go wrong."""

from __future__ import annotations

import pytest

from mini_vllm import LLM, SamplingParams
from mini_vllm.kv_transfer.processes import PrefillDecode, kill
from mini_vllm.kv_transfer.tests.faults import check, run
from mini_vllm.kv_transfer.tests.support import CONFIG, Job, alone, engine, pair, transfer_of
from mini_vllm.kv_transfer.transfers import Outbox
from mini_vllm.kv_transfer.wire import Fingerprint, Kind, Message

PROMPT = (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4)


def test_a_layer_has_come_before_the_next_is_computed():
    """Four chunks of four tokens. The consumer has asked by the third."""
    made = pair(stream=True, producer={"max_num_batched_tokens": 4})
    made.add(Job(PROMPT, 4, "r"))
    half, inbox = transfer_of(made.producer).worker_half, transfer_of(made.consumer).worker_half
    saved, came = half.save_kv_layer, []

    def save_kv_layer(name, *rest):
        before = len(inbox.transport.news)
        saved(name, *rest)
        news = [m.fields for _, m in inbox.transport.news[before:] if m.kind == Kind.LAYER]
        came.append([(each["layer"], each["first"], each["num_tokens"]) for each in news])

    half.save_kv_layer = save_kv_layer
    made.run()
    first, second, third, last = (came[at : at + 3] for at in range(0, 12, 3))
    assert first == second == [[], [], []]  # what they computed came when it was asked for
    assert third == [[(0, 8, 4)], [(1, 8, 4)], [(2, 8, 4)]]
    assert last == [[(0, 12, 4)], [(1, 12, 4)], [(2, 12, 4)]]
    assert made.jobs["r"].request.output_token_ids == alone(PROMPT, 4)
    check(made)


def test_a_hit_that_another_computes_in_the_same_step_is_not_read_before_its_layer():
    """A prompt adopts a block that another is just filling; found among 10,000 random faults."""
    run(1, seed=1507)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_that_is_preempted_is_not_read_until_it_is_computed_again(ahead):
    """Its blocks are another's meanwhile, and the consumer asks just then."""
    knobs = {"num_blocks": 7, "max_num_batched_tokens": 2, "async_scheduling": ahead}
    made = pair(stream=True, producer={**knobs, "enable_prefix_caching": False})
    params, preempted = SamplingParams(max_tokens=20, ignore_eos=True), []
    made.producer.add_request([1, 2, 3], params, request_id="neighbour")
    made.add(Job(PROMPT[:14], 4, "r"))
    made.producer.observers.append(lambda plan: preempted.extend(plan.preempted_req_ids))
    while not preempted:
        made.step()
        for talk in made.network._conversations:
            talk.starts = made.steps + 2
    assert preempted == ["r"]
    for talk in made.network._conversations:
        talk.starts = 0
    made.run()
    assert made.jobs["r"].request.output_token_ids == alone(PROMPT[:14], 4)
    check(made)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_prompt_whose_producer_lets_it_go_is_computed_or_ends(policy):
    made = pair(stream=True, policy=policy, producer={"max_num_batched_tokens": 2})
    made.add(Job(PROMPT, 4, "r"))
    for _ in range(3):
        made.step()
    assert transfer_of(made.consumer).stats()["loading"] == 1
    made.producer.abort_request("r")
    made.run()
    check(made)
    request = made.jobs["r"].request
    assert request.finish_reason == {"recompute": "length", "fail": "error"}[policy]
    assert policy == "recompute" or "never here, or given up" in request.stop_reason


FINGERPRINT = Fingerprint("m", "float64", 2, CONFIG.num_key_value_heads, CONFIG.head_dim)


@pytest.fixture
def outbox():
    cache = engine().runner.kv_cache
    made = Outbox(FINGERPRINT, 30.0, lambda: 0.0)
    made.caches = list(cache[:2])
    made.expect("r", 6, "hash")
    return made


def read(of):
    return of.answer(Message(Kind.READ, {"request_id": "r", "first": 2, "prompt_hash": "hash"}))


def told(message):
    return message and (message.kind.name, message.fields.get("layer"), message.fields.get("first"))


def test_an_answer_waits_for_each_layer_of_each_chunk(outbox):
    answers = read(outbox)
    assert next(answers) is None
    outbox.grow([("r", [3, 4], 4)])
    assert next(answers) is None
    outbox.computed(0)
    assert told(next(answers)) == ("LAYER", 0, 0)
    assert next(answers) is None
    outbox.computed(1)
    assert told(next(answers)) == ("LAYER", 1, 0)
    outbox.grow([("r", [3, 4], 6)])
    outbox.computed(0)
    assert told(next(answers)) == ("LAYER", 0, 2)
    outbox.pause("r")
    assert next(answers) is None
    outbox.grow([("r", [5, 6], 6)])
    outbox.computed(1)
    assert told(next(answers)) == ("LAYER", 1, 2)
    assert told(next(answers)) == ("END", None, None)


def test_who_has_all_of_a_prompt_before_it_ends_need_not_say_it_again(outbox):
    outbox.grow([("r", [3, 4], 6)])
    outbox.computed(0)
    outbox.computed(1)
    assert [told(each)[0] for each in read(outbox)] == ["LAYER", "LAYER", "END"]
    assert list(outbox.answer(Message(Kind.DONE, {"request_id": "r"}))) == []
    assert outbox.take_ended() == []  # its blocks are still written
    outbox.offer("r", [3, 4], 6, "hash")
    assert outbox.take_ended() == ["r"] and not len(outbox)


def test_a_prompt_that_is_dropped_is_gone(outbox):
    outbox.grow([("r", [3, 4], 6)])
    outbox.computed(0)
    answers = read(outbox)
    assert told(next(answers)) == ("LAYER", 0, 0)
    outbox.drop("r")
    assert next(answers).kind == Kind.GONE and next(answers, "over") == "over"
    assert outbox.take_ended() == []


TEXTS = ["hello world, how are", "hello world, who is", "a", "the quick brown fox jumps over it"]


@pytest.mark.slow
def test_two_processes_that_stream_say_what_one_engine_says():
    params = SamplingParams(max_tokens=8)
    expected = [o.outputs[0].token_ids for o in LLM("byte-llama").generate(TEXTS, params)]
    knobs = {"num_blocks": 64, "max_num_batched_tokens": 16}
    with PrefillDecode("byte-llama", extra={"stream": True}, **knobs) as pair_:
        for _ in range(2):
            assert [a.token_ids for a in pair_.generate(TEXTS, params)] == expected
        assert pair_.num_fallbacks == 0
        kill(pair_.engines["kv_producer"])
        assert [a.token_ids for a in pair_.generate(TEXTS, params)] == expected
        assert pair_.num_fallbacks == len(TEXTS)
