"""Events of an engine's index, and the router that believes them."""

from __future__ import annotations

import random

import pytest

from mini_vllm import SamplingParams
from mini_vllm.kv_transfer.events import BlockStored, KVEventPublisher, MissedEventsError
from mini_vllm.kv_transfer.router import PrefixIndex, Router, block_hashes
from mini_vllm.kv_transfer.tests.support import alone, engine

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def listening(**knobs):
    """An engine and what it publishes."""
    of = engine(**knobs)
    return of, KVEventPublisher(of.scheduler.kv.block_pool, 4)


def test_a_batch_says_which_blocks_a_step_has_stored():
    of, publisher = listening()
    of.generate([[1, 2, 3, 4, 5, 6, 1, 2, 3]], PARAMS)
    batch = publisher.publish()
    hashes = block_hashes([1, 2, 3, 4, 5, 6, 1, 2, 3], 4)
    assert batch.events[0] == BlockStored(tuple(hashes), None, (1, 2, 3, 4, 5, 6, 1, 2), 4)
    assert batch.number == 0 and publisher.publish() is None


@pytest.mark.slow
def test_the_index_holds_what_the_engine_holds_after_every_step():
    rng = random.Random(5)
    of, publisher = listening(num_blocks=14)
    index, prompts = PrefixIndex(), []
    for number in range(40):
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(4, 16))]
        prompts.append(prompt)
        of.add_request(prompt, PARAMS, request_id=f"r{number}")
        while of.has_unfinished_requests():
            of.step()
            if (batch := publisher.publish()) is not None:
                index.apply(batch)
        if number % 13 == 12:
            of.reset_prefix_cache()
            index.apply(publisher.publish())
        held = of.scheduler.kv.block_pool.cached_block_hash_to_block
        assert len(index) == len(held)
        for each in prompts[-6:]:
            hashes = block_hashes(each, 4)
            real = next((i for i, h in enumerate(hashes) if h not in held), len(hashes))
            assert index.num_hits(hashes) == real


def test_a_gap_is_noticed_and_a_replay_fills_it():
    of, publisher = listening()
    batches = []
    for number in range(3):
        of.generate([[number] * 8], PARAMS)
        batches.append(publisher.publish())
    index = PrefixIndex()
    index.apply(batches[0])
    with pytest.raises(MissedEventsError, match="batch 2 came, need 1"):
        index.apply(batches[2])
    for batch in publisher.replay(index.next_number):
        index.apply(batch)
    index.apply(batches[1])  # comes late, and is ignored
    assert index.next_number == 3 and index.num_hits(block_hashes([1] * 8, 4)) == 2


def test_what_is_not_kept_any_more_is_said():
    of = engine()
    publisher = KVEventPublisher(of.scheduler.kv.block_pool, 4, buffer_steps=2)
    for number in range(4):
        of.generate([[number] * 8], PARAMS)
        publisher.publish()
    with pytest.raises(MissedEventsError, match="batches 0 to 1 were dropped"):
        publisher.replay(0)
    assert [batch.number for batch in publisher.replay(2)] == [2, 3]
    assert publisher.replay(4) == []


def fleet(policy, **knobs):
    """Two engines, their publishers and a router."""
    engines = [listening(**knobs) for _ in range(2)]
    return engines, Router(2, 4, policy)


def serve(engines, router, prompts):
    """Each prompt, one after the other; where they went."""
    chosen = []
    for number, prompt in enumerate(prompts):
        choice = router.send(f"r{number}", prompt)
        of, publisher = engines[choice.engine]
        text = of.generate([list(prompt)], PARAMS)[0].outputs[0].token_ids
        assert text == alone(tuple(prompt), 3)
        router.finished(f"r{number}")
        if (batch := publisher.publish()) is not None:
            router.indexes[choice.engine].apply(batch)
        chosen.append(choice)
    return chosen


def test_by_prefix_a_conversation_stays_where_it_began():
    engines, router = fleet("prefix")
    one, two = [1, 2, 3, 4, 5, 6, 0, 1], [6, 5, 4, 3, 2, 1, 0, 6]
    router.loads = [1, 0]  # so that the second begins elsewhere
    first = serve(engines, router, [one])
    router.loads = [0, 1]
    second = serve(engines, router, [two])
    router.loads = [0, 0]
    assert (first[0].engine, second[0].engine) == (1, 0)
    later = serve(engines, router, [[*one, 1, 2], [*two, 1, 2], [*one, 3, 3, 3, 3, 3]])
    assert [(c.engine, c.num_hits) for c in later] == [(1, 2), (0, 2), (1, 2)]


def test_by_load_the_idler_engine_is_chosen_whatever_it_holds():
    engines, router = fleet("load")
    serve(engines, router, [[1] * 8])
    router.loads = [3, 2]
    assert router.choose([1] * 8).engine == 1


def test_by_both_a_prefix_is_worth_as_much_as_the_blocks_that_it_saves():
    engines, router = fleet("both")
    serve(engines, router, [[1] * 12])
    assert router.choose([1] * 13).num_hits == 3
    for load, engine_of in ((2, 0), (3, 1)):
        router.loads = [load, 0]
        assert router.choose([1] * 13).engine == engine_of


def test_a_stale_index_costs_a_hit_and_no_answer():
    engines, router = fleet("prefix", num_blocks=8)
    serve(engines, router, [[1] * 8])
    of, _ = engines[0]
    of.generate([[2, 3] * 8], PARAMS)  # evicts, and the router has not heard of it
    choice = router.choose([1] * 9)
    assert choice.num_hits == 2
    assert of.generate([[1] * 9], PARAMS)[0].outputs[0].token_ids == alone((1,) * 9, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 4), "num_engines=0"), ((2, 0), "block_size=0"), ((2, 4, "fair"), "policy='fair'"),
        ((2, 4, "both", -1.0), "load_weight=-1.0"),
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        Router(*arguments)


def test_an_id_that_is_under_way_is_refused():
    router = Router(2, 4)
    router.send("r", [1, 2])
    with pytest.raises(ValueError, match="request_id='r'"):
        router.send("r", [1, 2])
    router.finished("r")
    router.finished("unknown")
    assert router.loads == [0, 0]


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="need at least one token"):
        Router(2, 4).choose([])
