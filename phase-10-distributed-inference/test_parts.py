"""Lab 10-01 as a part of the engine: ranks compute with the shards that the lab's functions cut."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from course.learning import mine
from course.learning.labs import find_labs
from labkit.mine import PassedCourse
from mini_vllm import LLM, SamplingParams
from mini_vllm.distributed.config import ParallelConfig
from mini_vllm.distributed.shards import FolderSource, PartSource, RankWeights
from mini_vllm.models.loader import load_checkpoint, resolve

PHASE = Path(__file__).parent


@pytest.fixture
def supplied():
    (lab,) = [lab for lab in find_labs(PHASE.parent) if lab.id == "10-01"]
    parts, owners = mine.parts_of([lab], lambda lab: True, lambda lab: lab.solution)
    assert owners["shards"].id == "10-01"
    return parts


def cut_by(parts, model, parallel):
    config = load_checkpoint(model, read=lambda folder, config: {}).config
    source = FolderSource(resolve(model), config)
    cut = mine.engine_parts(parts).of_room("distributed", "shards")
    return source, PartSource(source, parallel.tensor_parallel_size, parallel.place, cut)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("byte-llama", {"tensor_parallel_size": 4}),
        *(
            pytest.param(model, {"tensor_parallel_size": 2, **more}, marks=pytest.mark.slow)
            for model, more in (
                ("byte-llama", {"pipeline_parallel_size": 2}), ("byte-moe", {}),
                ("byte-moe", {"enable_expert_parallel": True}),
            )
        ),
    ],
)  # fmt: skip
def test_every_rank_holds_what_the_rooms_own_shards_give_it(supplied, model, settings):
    parallel = ParallelConfig(**settings)
    calls = mine.counted(supplied)
    source, own = cut_by(supplied, model, parallel)
    own = pickle.loads(pickle.dumps(own))  # it is sent to the ranks
    for rank in range(parallel.world_size):
        place = parallel.place(rank)
        theirs, ours = RankWeights(source, place), RankWeights(own, place)
        for name in theirs:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=f"{rank} {name}")
    assert calls["shards"] > 0


def test_a_shard_of_the_wrong_shape_is_refused_as_the_parts(supplied):
    lab = supplied["shards"]
    lab.shard_rows = lambda weight, rank, world: weight[:, :1]
    with pytest.raises(RuntimeError, match=r"shards part: gave rank 0 of 2 a .* need"):
        cut_by(supplied, "byte-llama", ParallelConfig(tensor_parallel_size=2))


@pytest.mark.slow
def test_ranks_that_hold_the_labs_shards_say_what_one_process_says(supplied):
    params = SamplingParams(max_tokens=8)
    said = []
    for parts, settings in ((supplied, {"tensor_parallel_size": 2}), ({}, {})):
        with LLM(parts=mine.engine_parts(parts), dtype="float64", **settings) as llm:
            said.append([out.outputs[0].text for out in llm.generate(["A block", "To"], params)])
    assert said[0] == said[1]


@pytest.mark.slow
def test_course_run_mine_takes_them(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["10-01", "04-03"], monkeypatch, capsys)
    said = course.run("A", "--mine", "--tensor-parallel-size", "2", max_tokens=4)
    assert "The ranks use the engine's own parts in place of yours: attention." in said
    assert "attention          yours, rests here" in said
    assert "shards             yours, from lab 10-01: 224 calls" in said
