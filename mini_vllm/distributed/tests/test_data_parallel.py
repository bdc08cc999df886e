"""Engines behind one balancer: real processes, the shipped model."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mini_vllm import LLM, SamplingParams
from mini_vllm.distributed.data_parallel import DataParallelLLM

KNOBS: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 4, "max_model_len": 256}
PROMPTS = ["The scheduler", "A block", "The KV cache", "A request", "Every step"]


@pytest.fixture(scope="module")
def two() -> Iterator[DataParallelLLM]:
    with DataParallelLLM(data_parallel_size=2, **KNOBS) as llm:
        yield llm


def texts(outputs: list[Any]) -> list[list[str]]:
    return [[completion.text for completion in output.outputs] for output in outputs]


@pytest.mark.slow
def test_texts_are_those_of_one_engine_in_the_order_of_the_prompts(two: DataParallelLLM) -> None:
    params = [SamplingParams(max_tokens=3 + 5 * i) for i in range(len(PROMPTS))]
    assert texts(two.generate(PROMPTS, params)) == texts(LLM(**KNOBS).generate(PROMPTS, params))
    assert set(two.ranks.values()) == {0, 1}


def test_several_completions_of_a_seeded_prompt_are_those_of_one_engine(
    two: DataParallelLLM,
) -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=6)
    assert texts(two.generate(PROMPTS[:2], params)) == texts(
        LLM(**KNOBS).generate(PROMPTS[:2], params)
    )


def test_a_request_may_name_its_rank(two: DataParallelLLM) -> None:
    two.generate(PROMPTS, SamplingParams(max_tokens=1), data_parallel_rank=1)
    assert set(two.ranks.values()) == {1}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"prompts": ["fine", ""]}, "prompt is empty"),
        ({"prompts": ["fine"], "data_parallel_rank": 2}, "data_parallel_rank=2: need 0 to 1"),
        ({"prompts": ["fine", "too"], "data_parallel_rank": [0]}, "has 1 entries for 2 prompts"),
        ({"prompts": "x" * 400}, "max_model_len=256"),
    ],
)
def test_a_refused_call_runs_nothing_and_leaves_the_ranks_as_they_were(
    two: DataParallelLLM, asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        two.generate(**asked)
    assert len(two.generate(["The"], SamplingParams(max_tokens=1))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DataParallelLLM(data_parallel_size=1), "data_parallel_size=1"),
        (lambda: DataParallelLLM(object()), "need a name or a folder"),  # type: ignore[arg-type]
        (lambda: DataParallelLLM(num_blocks=-1), "num_blocks=-1"),
    ],
)
def test_what_no_rank_can_serve_is_refused_and_leaves_no_process(
    make: Callable[[], Any], named: str
) -> None:
    before = len(multiprocessing.active_children())
    with pytest.raises(ValueError, match=named):
        make()
    assert len(multiprocessing.active_children()) == before


def test_a_rank_that_dies_is_named_and_the_others_end_in_time(two: DataParallelLLM) -> None:
    """The last test of the file: it ends the engines of the others."""
    processes = list(two._processes)
    assert processes[1].pid is not None
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="data rank 1 died"):
        two.generate(PROMPTS, SamplingParams(max_tokens=200))
    assert not any(process.is_alive() for process in processes)
    with pytest.raises(ValueError, match="closed"):
        two.generate(PROMPTS)
