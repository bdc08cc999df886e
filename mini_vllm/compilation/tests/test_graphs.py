"""Steps on graphs: what v0.22.1 dispatches, the tokens without graphs, and what is refused."""

from __future__ import annotations

import pytest

from conformance import parts
from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.compilation.dispatcher import MODES, CudagraphDispatcher
from mini_vllm.compilation.graphs import default_capture_sizes
from mini_vllm.observe.trace import traced_steps

CASES = parts.load("cudagraph_modes")


def of_kind(kind):
    return [case for case in CASES if case["kind"] == kind]


def test_every_recorded_step_resolution_and_pass_is_the_real_dispatchers():
    compared = 0
    for case in of_kind("dispatch"):
        ours = CudagraphDispatcher(case["mode"], case["sizes"], case["max_num_seqs"])
        passes = [[mode, sizes] for _, mode, sizes in ours.capture_passes()]
        assert passes == case["passes"], case["mode"]
        for num_tokens, found in enumerate(case["found"], 1):
            for expected, uniform, forbid in zip(
                found, (False, False, True, True), (False, True, False, True), strict=True
            ):
                if expected is not None:
                    assert [*ours.dispatch(num_tokens, uniform, forbid)] == expected
                    compared += 1
    assert compared == 33_320
    for case in of_kind("resolve"):
        ours = CudagraphDispatcher(case["mode"], [1, 2, 4, 8], 8)
        asked = case["support"], case["split"], case["query_len"]
        if case["resolved"] == "ValueError":
            with pytest.raises(ValueError, match="not support full graphs"):
                ours.resolve(*asked)
        else:
            assert ours.resolve(*asked) == case["resolved"], case


def test_default_sizes_are_the_recorded_ones():
    for case in of_kind("ladder"):
        if case["query_len"] == 1 and case["performance_mode"] == "balanced":
            seqs, tokens = case["max_num_seqs"], case["max_num_batched_tokens"]
            assert default_capture_sizes(seqs, tokens) == case["sizes"], (seqs, tokens)


def served(**knobs):
    engine = LLMEngine(dtype="float64", max_num_seqs=4, max_num_batched_tokens=24, **knobs)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    for name, text in {"a": "A block", "b": "The scheduler plans", "c": "To"}.items():
        engine.add_request(text, params, request_id=name)
    requests = list(engine.requests.values())
    steps = [record.to_json() for record in traced_steps(engine)]
    return engine, [request.output_token_ids for request in requests], steps


ALL = pytest.param(True, [*MODES], marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("asynchronous", "modes"), [(False, ["FULL_AND_PIECEWISE"]), ALL])
def test_tokens_and_steps_are_those_without_graphs_in_every_mode(asynchronous, modes):
    _, tokens, steps = served(async_scheduling=asynchronous)
    for mode in modes:
        engine, ours, our_steps = served(
            async_scheduling=asynchronous, compilation_config={"cudagraph_mode": mode}
        )
        graphs = engine.feature("compilation")
        assert (ours, our_steps) == (tokens, steps), mode
        assert sum(graphs.steps().values()) == len([s for s in steps if s["num_scheduled_tokens"]])
        assert (graphs.model.num_padded > 0) == (mode != "NONE"), mode
        on_graphs, without = graphs.launches()
        assert on_graphs < without or mode == "NONE"


class Uncaptured(CudagraphDispatcher):
    def dispatch(self, num_tokens, uniform, forbid_full=False):
        return "FULL", num_tokens + 1000


def test_a_part_that_names_a_graph_that_is_not_there_is_refused_by_name():
    parts = EngineParts(rooms={"compilation": {"dispatcher": Uncaptured}})
    with pytest.raises(RuntimeError, match=r"dispatcher part: \('FULL', 10\d\d\) for a step"):
        served(compilation_config={"cudagraph_mode": "FULL"}, parts=parts)


@pytest.mark.parametrize(
    ("knobs", "word"),
    [
        ({"compilation_config": 3}, "need {'cudagraph_mode'"),
        ({"compilation_config": {"cudagraph_mode": "SOME"}}, "cudagraph_mode='SOME'"),
        ({"compilation_config": {"cudagraph_mode": "FULL", "backend": "x"}}, "need {'cudagraph"),
        (
            {"compilation_config": {"cudagraph_mode": "FULL"}, "enable_lora": True},
            "enable_lora=True with compilation_config: the two",
        ),
        (
            {"compilation_config": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [0]}},
            "cudagraph_capture_sizes=0",
        ),
        (
            {"compilation_config": {"cudagraph_mode": "FULL"}, "model": "byte-window"},
            "one kind of KV cache",
        ),
        (
            {"compilation_config": {"cudagraph_mode": "FULL"}, "model": "byte-sees"},
            "one kind of KV cache",
        ),
        (
            {"compilation_config": {"cudagraph_mode": "FULL"}, "model": "toy"},
            "one kind of KV cache",
        ),
    ],
)
def test_what_does_not_go_with_graphs_is_refused_by_name(knobs, word):
    with pytest.raises(ValueError, match=word):
        LLMEngine(**knobs)
