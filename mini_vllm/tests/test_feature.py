"""A room that nobody knew of joins an engine: the door, the gate, the step, the end."""

from __future__ import annotations

import pytest

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.feature import Feature, RequestInput
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


class PictureGate(Gate):
    """No chunk ends inside a picture, and a step encodes one."""

    def __init__(self, starts: dict[str, int]) -> None:
        self.starts = starts
        self.encodes: dict[str, SchedulerOutput] = {}

    def admission(self, request, plan):
        return "stop" if any(plan is other for other in self.encodes.values()) else "admit"

    def limit(self, request, start, num_new):
        at = self.starts.get(request.request_id)
        return num_new if at is None or start >= at else min(num_new, at - start)

    def scheduled(self, request, num_new, plan):
        at = self.starts.get(request.request_id)
        if at is not None and at == request.num_computed_tokens:
            self.encodes[request.request_id] = plan


class Pictures(Feature):
    """Takes `picture=(place, name)`, which is part of the blocks' hashes."""

    name = "pictures"

    def __init__(self) -> None:
        self.starts: dict[str, int] = {}
        self.gate = PictureGate(self.starts)
        self.log: list[str] = []
        self._at: int | None = None

    def process_input(self, inputs: RequestInput) -> None:
        picture = inputs.options.get("picture")
        self._at = None
        if picture is None:
            return
        if picture[0] < 0:
            raise ValueError(f"picture={picture!r}: need a place in the prompt")
        inputs.accepted_options.add("picture")
        inputs.extra_keys.append(picture[1])
        self._at = picture[0]

    def add_request(self, request: Request) -> None:
        if self._at is not None:
            self.starts[request.request_id] = self._at

    def remove_request(self, request_id: str) -> None:
        self.starts.pop(request_id, None)

    def before_execute(self, plan: SchedulerOutput) -> dict[str, str]:
        self.log += [f"encode {n}" for n, other in self.gate.encodes.items() if other is plan]
        return {}

    def after_update(self, plan, sampled, finished, scheduler) -> None:
        self.log += [f"end {request.request_id}" for request in finished]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_room_that_joins_changes_chunks_and_no_token(is_async):
    plain = LLMEngine("toy", async_scheduling=is_async).generate([range(40)], PARAMS)
    engine = LLMEngine("toy", async_scheduling=is_async)
    pictures = Pictures()
    engine.join(pictures)
    chunks: list[int] = []
    engine.observers.append(lambda plan: chunks.extend(plan.num_scheduled_tokens.values()))
    [output] = engine.generate([range(40)], PARAMS, picture=[(24, "cat")])
    assert output.outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert chunks[:2] == [24, 16]
    assert [line.split()[0] for line in pictures.log] == ["encode", "end"]
    assert pictures.starts == {}


def test_equal_tokens_under_another_picture_share_no_block():
    engine = LLMEngine("toy", block_size=4)
    engine.join(Pictures())
    hits: list[int] = []
    engine.observers.append(lambda plan: hits.extend(plan.num_cached_tokens.values()))
    for name in ("cat", "dog", "cat"):
        engine.generate([range(40)], PARAMS, picture=[(24, name)])
    assert hits == [0, 0, 36]


def test_an_option_that_no_room_takes_is_refused_by_name():
    engine = LLMEngine("toy")
    with pytest.raises(ValueError, match=r"picture=.*: need a room that takes it"):
        engine.add_request([1, 2], PARAMS, picture=(1, "cat"))
    engine.join(Pictures())
    with pytest.raises(ValueError, match="need a place in the prompt"):
        engine.add_request([1, 2], PARAMS, picture=(-1, "cat"))
    assert not engine.requests
