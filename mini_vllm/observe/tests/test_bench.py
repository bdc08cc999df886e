"""Described workloads: repeatable requests, exact counts, refused descriptions."""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm.engine import LLMEngine
from mini_vllm.observe.bench import Workload, run_workload
from mini_vllm.tests.support import for_all


@pytest.mark.slow
@for_all(
    lambda st: st.integers(1, 20),
    lambda st: st.tuples(st.integers(4, 9), st.integers(0, 9)),
    lambda st: st.integers(0, 4),
    lambda st: st.integers(0, 99),
)
def test_requests_follow_the_description_and_repeat_with_the_seed(count, span, shared, seed):
    low, high = span[0], span[0] + span[1]
    workload = Workload(count, (low, high), (2, 5), 0.0, shared, seed)
    requests = workload.requests(257)
    assert requests == workload.requests(257)
    assert len(requests) == count
    prefixes = set()
    for arrival, prompt, num_outputs in requests:
        assert arrival == 0.0
        assert low <= len(prompt) <= high
        assert 2 <= num_outputs <= 5
        prefixes.add(tuple(prompt[:shared]))
    assert len(prefixes) == 1


def test_arrivals_start_at_zero_and_never_go_back():
    arrivals = [a for a, _, _ in Workload(50, request_rate=100.0).requests(257)]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] > 0.0


def test_a_run_counts_tokens_hits_and_latency_samples():
    """Four prompts of 8 with 4 common tokens, blocks of 4: three hits of one block each."""
    engine = LLMEngine(num_blocks=64, block_size=4, model="toy")
    progress: list[int] = []
    result = run_workload(engine, Workload(4, (8, 8), (3, 3), 0.0, 4), progress.append)
    assert (result.prompt_tokens, result.output_tokens) == (32, 12)
    assert (result.cached_tokens, result.preemptions, result.num_steps) == (12, 0, 3)
    assert (len(result.ttft), len(result.itl)) == (4, 8)
    assert progress == [0, 0, 4]
    assert not engine.has_unfinished_requests()
    assert engine.observers == []


def test_a_request_that_cannot_fit_refuses_the_whole_run():
    engine = LLMEngine(num_blocks=3, block_size=4, model="toy")
    with pytest.raises(ValueError, match="the pool has 2"):
        run_workload(engine, Workload(2, (8, 8), (9, 9)))
    assert not engine.has_unfinished_requests()


def test_an_interrupted_run_leaves_an_idle_engine():
    engine = LLMEngine(num_blocks=64, block_size=4, model="toy")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_workload(engine, Workload(3, (8, 8), (9, 9)), stop)
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.kv.usage == 0.0


def test_requests_that_end_in_an_error_are_counted_apart():
    class Broken:
        def forward(self, batch):
            return np.full((len(batch.seq_lens), 257), np.nan)

    result = run_workload(LLMEngine(Broken(), num_blocks=64), Workload(2, (8, 8), (9, 9)))
    assert list(result.errors.values()) == ["the model's logits hold NaN or infinity"] * 2
    assert result.output_tokens == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_requests": 0}, "num_requests=0: need at least 1"),
        (
            {"num_requests": 10**11},
            "num_requests=100000000000: need at least 1",
        ),
        ({"num_requests": 10**6, "prompt_len": (1, 99)}, "need at most 67108864 prompt tokens"),
        ({"num_requests": 1.5}, r"num_requests=1\.5: need an int"),
        (
            {"prompt_len": (5, 10**11)},
            "5-100000000000: need 1 <= low <= high <= 1000000",
        ),
        ({"seed": -1}, "seed=-1: need 0 or more"),
        ({"request_rate": float("inf")}, "request_rate=inf: need a finite number"),
        ({"prompt_len": (5, 4)}, "prompt_len=5-4: need 1 <= low <= high"),
        ({"output_len": (0, 4)}, "output_len=0-4: need 1 <= low <= high"),
        ({"request_rate": -1.0}, r"request_rate=-1\.0: need 0 \(all at once\) or more"),
        ({"request_rate": float("nan")}, "request_rate=nan"),
        ({"shared_prefix_len": 17}, "shared_prefix_len=17: need 0 to the shortest prompt, 16"),
    ],
)
def test_a_description_out_of_range_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Workload(**fields)
