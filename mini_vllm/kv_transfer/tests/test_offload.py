"""Blocks that leave for host memory and disk and come back: the tokens stay the same."""

from __future__ import annotations

import random

import pytest

from mini_vllm import SamplingParams
from mini_vllm.kv_transfer.offload import HostBlocks
from mini_vllm.kv_transfer.tests.support import alone, engine, transfer_of

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
PROMPT = (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3)


def made(policy="fail", extra=None, **knobs):
    return engine(
        kv_transfer_config={
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_load_failure_policy": policy, "kv_connector_extra_config": extra or {},
        },
        **{"block_size": 2, **knobs},
    )  # fmt: skip


def said(of, prompt=PROMPT):
    return of.generate([list(prompt)], PARAMS)[0].outputs[0]


def loaded(of):
    return transfer_of(of).stats()["num_external_tokens"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("factor", [1, 2, 3, 4])
def test_a_prompt_comes_back_in_whole_chunks(factor, ahead):
    of = made(extra={"block_size": 2 * factor}, async_scheduling=ahead)
    said(of)
    of.reset_prefix_cache()
    assert said(of).token_ids == alone(PROMPT, 3)
    assert loaded(of) == len(PROMPT) // (2 * factor) * (2 * factor)


def test_behind_a_hit_of_the_cache_the_rest_of_a_chunk_is_loaded():
    """Six tokens hit, chunks are of four: the load begins in the middle of the second."""
    of = made(extra={"block_size": 4})
    said(of)
    of.reset_prefix_cache()
    of.generate([[*PROMPT[:6], 6]], PARAMS)  # its first four tokens are loaded
    before = loaded(of)
    assert said(of).token_ids == alone(PROMPT, 3)
    assert loaded(of) - before == 10


@pytest.mark.slow
@pytest.mark.parametrize("disk", [0, 64])
@pytest.mark.parametrize("seed", range(4))
def test_random_prompts_through_a_small_pool_say_what_one_engine_says(tmp_path, seed, disk):
    rng = random.Random(seed)
    extra = {"block_size": 2 * rng.choice((1, 2, 3)), "num_cpu_blocks": rng.choice((4, 9, 40))}
    extra |= {"disk_path": str(tmp_path), "num_disk_blocks": disk}
    of = made(
        extra=extra, num_blocks=24, max_num_seqs=3, max_num_batched_tokens=9,
        async_scheduling=seed % 2 == 1,
    )  # fmt: skip
    stems = [[rng.randint(0, 6) for _ in range(14)] for _ in range(5)]
    requests = []
    for number in range(30):
        stem = rng.choice(stems)
        prompt = [*stem[: rng.randint(4, 14)], *[rng.randint(0, 6)] * rng.randint(0, 2)]
        name = of.add_request(prompt, PARAMS, request_id=f"r{number}")
        requests.append((of.requests[name], tuple(prompt)))
        for _ in range(rng.randint(0, 4)):
            if of.has_unfinished_requests():
                of.step()
    while of.has_unfinished_requests():
        of.step()
    for request, prompt in requests:
        assert request.output_token_ids == alone(prompt, 3), request
    assert of.scheduler.kv.usage == 0.0
    assert loaded(of) > 0 or extra["num_cpu_blocks"] == 4
    assert transfer_of(of).num_failed_loads == 0
    of.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_damaged_file_costs_a_load(tmp_path, policy):
    extra = {"num_cpu_blocks": 8, "disk_path": str(tmp_path), "num_disk_blocks": 40}
    of = made(policy, extra)
    said(of)
    of.generate([[6, 5, 4, 3, 2, 1, 0, 6, 5, 4, 3, 2, 1, 0, 6, 6]], PARAMS)  # to disk with it
    of.reset_prefix_cache()
    files = sorted(tmp_path.rglob("*.kv"))
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(bytes(data))
    output = said(of)
    if policy == "recompute":
        assert output.token_ids == alone(PROMPT, 3)
    else:
        assert output.finish_reason == "error" and "its checksum differs" in str(output.stop_reason)
    assert transfer_of(of).num_failed_loads == 1 and of.scheduler.kv.usage == 0.0
    of.close()


@pytest.mark.parametrize(
    ("extra", "knobs", "said"),
    [
        ({"block_size": 3}, {}, "block_size=3: need a multiple of the cache's 2"),
        ({"num_cpu_blocks": 0}, {}, "num_cpu_blocks=0"),
        ({"num_disk_blocks": 4}, {}, "disk_path=None: need a folder"),
        ({"cpu_blocks": 4}, {}, "holds 'cpu_blocks'"),
        ({}, {"enable_prefix_caching": False}, "enable_prefix_caching=False: need True"),
    ],
)
def test_what_cannot_work_is_refused(extra, knobs, said):
    with pytest.raises(ValueError, match=said):
        made(extra=extra, **knobs)


def test_host_blocks_evict_what_was_used_longest_ago_and_nobody_reads():
    host = HostBlocks(3)
    first = host.prepare_store([1, 2, 3])
    assert first.block_ids == [0, 1, 2] and host.lookup(1) is None
    host.complete_store([1, 2, 3])
    host.touch([1])
    assert host.prepare_load([2]) == [1]
    assert host.prepare_store([4, 5]).evicted == [(3, 2), (1, 0)]
    assert host.prepare_store([6, 7]) is None  # 2 is read, 4 and 5 are written
    host.complete_load([2])
    assert host.prepare_store([6]).evicted == [(2, 1)]
