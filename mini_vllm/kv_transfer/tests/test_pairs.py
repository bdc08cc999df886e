"""Two engines over a simulated network: the tokens of one engine, whatever happens on the way."""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm import LLM, SamplingParams
from mini_vllm.kv_transfer.gate import ConnectorGate
from mini_vllm.kv_transfer.tests.faults import check, run
from mini_vllm.kv_transfer.tests.support import ORDERS, Job, alone, pair, random_pair, transfer_of

PROMPT = (1, 2, 3, 4, 5, 6, 1, 2, 3)


def one(made, prompt=PROMPT, **job):
    """One job, run to its end; its request at the consumer."""
    made.add(Job(prompt, 4, "r", **job))
    made.run()
    return made.jobs["r"].request


# ------------------------------------------------------------------ what must hold


@pytest.mark.parametrize("ahead", [False, True])
def test_the_consumer_computes_one_token_of_the_prompt(ahead):
    made = pair(slowest=3, per_tick=1, consumer={"async_scheduling": ahead})
    planned = []
    made.consumer.observers.append(lambda plan: planned.append(plan.num_scheduled_tokens.get("r")))
    request = one(made)
    assert request.output_token_ids == alone(PROMPT, 4)
    assert next(count for count in planned if count) == 1
    assert transfer_of(made.consumer).stats() == {
        "num_external_tokens": 9, "num_failed_loads": 0, "loading": 0, "held": 0,
    }  # fmt: skip
    check(made)


def test_the_producer_keeps_its_blocks_until_they_are_read():
    made = pair(slowest=0, per_tick=1)
    made.add(Job(PROMPT, 4, "r"))
    used = []
    while not made.steps or made.producer.has_unfinished_requests():
        made.step()
        used.append(made.producer.scheduler.kv.block_pool.get_num_free_blocks())
    assert used[0] == 24 - 1 - 3 and used[-1] == 24 - 1
    assert used.index(23) > 3  # it ended in the first step


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_output_is_that_of_one_engine_for_every_delay_and_order(seed):
    made = random_pair(seed)
    made.run()
    check(made)
    assert {job.request.finish_reason for job in made.jobs.values()} == {"length"}


@pytest.mark.slow
def test_output_is_that_of_one_engine_in_500_workloads():
    for seed in range(1000, 1500):
        made = random_pair(seed)
        made.run()
        check(made)
        assert {job.request.finish_reason for job in made.jobs.values()} == {"length"}, seed


@pytest.mark.slow
def test_random_faults_lose_nothing_and_leave_nothing():
    found = run(60)
    assert found["pairs"] < 60


@pytest.mark.slow
def test_a_thousand_random_faults_lose_nothing_and_leave_nothing():
    found = run(1000, seed=50_000)
    assert len(found) >= 13 + len(ORDERS)  # every kind happened
    assert all(found[order] for order in ORDERS)


def test_a_gate_that_frees_at_the_first_of_two_reports_is_noticed(monkeypatch):
    """As the pin does (46240): the load of a request that is gone goes on into another's blocks."""

    def let_go(self, request_id, reason):
        if request_id in self.held:
            self.kv.free(self.held.pop(request_id)[0])

    run(1, seed=13)
    monkeypatch.setattr(ConnectorGate, "_let_go", let_go)
    with pytest.raises(AssertionError, match="seed 13: "):
        run(1, seed=13)


def test_the_prefix_cache_of_the_consumer_is_not_asked_for_again():
    """The first blocks are there: only what is behind them travels."""
    made = pair()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    made.consumer.generate([list(PROMPT)], params)
    one(made)
    assert transfer_of(made.consumer).stats()["num_external_tokens"] == 1  # two blocks of four hit


def test_what_the_consumer_has_whole_is_released_without_a_transfer():
    made = pair(lease=10_000)
    made.consumer.generate([[*PROMPT, 0, 0, 0, 0]], SamplingParams(max_tokens=1, ignore_eos=True))
    one(made, (*PROMPT[:8], 3))
    sent = transfer_of(made.consumer).stats()["num_external_tokens"]
    assert sent == 1
    made = pair(lease=10_000)
    made.consumer.generate([list(PROMPT)], SamplingParams(max_tokens=1, ignore_eos=True))
    job = Job(PROMPT[:1], 2, "one token")
    made.add(job)
    made.run()
    check(made)


# ------------------------------------------------------------------ faults, one by one


def kept(policy, **knobs):
    return pair(policy=policy, lease=30, timeout=10, **knobs)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("corrupt", "ChecksumError"),
        ("truncate", "EndedEarlyError"),
        ("version", "VersionError: a peer of version 0"),
        ("flood", "TooLongError: a message of 4,294,967,295 bytes"),
        ("reset", "ConnectionResetError"),
        ("refuse", "ConnectionRefusedError"),
        ("silence", "no answer within 10"),
        ("early_end", "WireError: layer 0: the peer sent 0 tokens, need 9"),
        ("another_prompt", "are of another prompt"),
    ],
)
def test_a_fault_ends_the_request_with_its_name_or_has_it_computed(fault, said, monkeypatch):
    monkeypatch.setattr("mini_vllm.kv_transfer.simulated.FAULTS", (fault,))
    made = kept("fail", seed=3)
    made.network.fault_rate = 1.0
    request = one(made)
    assert request.finish_reason == "error" and said in str(request.stop_reason)
    check(made)
    made = kept("recompute", seed=3)
    made.network.fault_rate = 1.0
    assert one(made).output_token_ids == alone(PROMPT, 4)
    assert transfer_of(made.consumer).stats()["num_external_tokens"] == 0
    check(made)


def test_a_layer_that_comes_twice_is_refused(monkeypatch):
    monkeypatch.setattr("mini_vllm.kv_transfer.simulated.FAULTS", ("repeat",))
    made = kept("fail", seed=1)
    made.network.fault_rate = 1.0
    request = one(made)
    assert "need them from 9" in str(request.stop_reason)


def test_a_producer_that_dies_is_noticed_and_the_prompt_computed():
    made = kept("recompute", slowest=0, per_tick=1)
    made.dies_at = 4
    made.add(Job(PROMPT, 4, "r"))
    made.run()
    assert made.jobs["r"].request.output_token_ids == alone(PROMPT, 4)
    check(made)


def test_a_consumer_that_is_full_waits_and_the_lease_frees_the_producer():
    """Its pool holds one long request; what the producer keeps for the next is given up."""
    made = pair(policy="recompute", lease=4, timeout=50, consumer={"num_blocks": 8})
    made.consumer.add_request(
        [1] * 18, SamplingParams(max_tokens=10, ignore_eos=True), request_id="long"
    )
    made.add(Job(PROMPT, 4, "r"))
    made.run()
    assert made.jobs["r"].request.output_token_ids == alone(PROMPT, 4)
    assert transfer_of(made.consumer).num_failed_loads == 1
    check(made)


def test_a_client_that_goes_away_while_its_request_loads_leaves_nothing():
    made = pair(slowest=0, per_tick=1, lease=10_000)
    request = one(made, aborts_at=3)
    assert request.finish_reason == "abort"
    check(made)


def test_an_engine_that_starts_over_writes_nothing_of_the_loads_before():
    made = pair(slowest=0, per_tick=1, lease=60)
    made.restarts_at = 3
    assert one(made).output_token_ids == alone(PROMPT, 4)
    check(made)


def test_a_load_that_ended_is_not_written_any_more():
    made = pair(policy="recompute", timeout=2, slowest=0, per_tick=1)
    made.network.slowest = 5
    made.network.rng.seed(1)
    made.add(Job(PROMPT, 4, "r"))
    made.run()
    cache = np.array(made.consumer.runner.kv_cache)
    for _ in range(10):
        made.network.tick()
    assert np.array_equal(cache, made.consumer.runner.kv_cache)
    assert made.jobs["r"].request.output_token_ids == alone(PROMPT, 4)


# ------------------------------------------------------------------ the door


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"do_remote_decode": True}, "need kv_role='kv_producer'"),
        ({"do_remote_prefill": 1}, "need True or False"),
        ({"do_remote_prefill": True}, "remote_engine_id"),
        (3, "need a mapping"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(params, said):
    made = pair()
    with pytest.raises(ValueError, match=said):
        made.consumer.add_request([1, 2], kv_transfer_params=params)
    assert not made.consumer.has_unfinished_requests()


def test_the_parameters_of_another_prompt_are_refused():
    made = pair()
    made.add(Job(PROMPT, 4, "r"))
    made.producer.step()
    params = transfer_of(made.producer).take_kv_transfer_params("r")
    with pytest.raises(ValueError, match="prompt_hash is that of another prompt"):
        made.consumer.add_request([1, 2, 3], kv_transfer_params=params)


def test_an_interrupted_step_leaves_nothing_of_a_request_that_is_gone(monkeypatch):
    """The engine starts over without the request that was being added."""
    made = pair()
    room = transfer_of(made.consumer)

    def interrupted(request):
        raise KeyboardInterrupt

    monkeypatch.setattr(made.consumer.scheduler, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.consumer.add_request([1, 2, 3], request_id="r")
    assert not made.consumer.has_unfinished_requests()
    assert not room.scheduler_half._params and not room._params


def test_an_id_whose_blocks_are_being_read_is_refused():
    made = pair()
    made.add(Job(PROMPT, 4, "r"))
    made.producer.step()
    with pytest.raises(ValueError, match="request_id='r': need another id"):
        made.producer.add_request([1, 2, 3], request_id="r")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "knobs", "said"),
    [
        ("byte-llama", {"enable_lora": True}, "enable_lora=True: need none"),
        ("byte-llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
         "speculative_config=.*: need none"),
        ("byte-llama", {"tensor_parallel_size": 2}, "tensor_parallel_size=2: need none"),
        ("byte-sees", {}, "model='byte-sees': kv_transfer_config needs a model of text"),
        ("byte-window", {}, "'byte-window': kv_transfer_config needs a model whose layers"),
        ("byte-llama", {"release": "0.33.0"}, r"release='0\.33\.0' with kv_transfer_config: need"),
    ],
)  # fmt: skip
def test_what_was_not_compared_with_a_connector_is_refused_by_name(model, knobs, said):
    config = {"kv_connector": "SocketConnector", "kv_role": "kv_consumer"}
    with pytest.raises(ValueError, match=said):
        LLM(model, kv_transfer_config=config, **knobs)
