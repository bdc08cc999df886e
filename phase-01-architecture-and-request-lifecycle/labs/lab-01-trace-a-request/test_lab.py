"""What lab 01-01 pins: one row of values per step, and the arithmetic of the two counters."""

from __future__ import annotations

import pytest

from mini_vllm import LLMEngine

HELLO = [
    ("RUNNING", 5, 6),
    ("RUNNING", 6, 7),
    ("RUNNING", 7, 8),
    ("FINISHED_LENGTH", 8, 9),
]


def run(lab, prompt: str, max_tokens: int = 4, **engine_kwargs):
    """A trace on the scheduling-only model; a list of (status, computed, tokens)."""
    return lab.trace_request(prompt, max_tokens, model="toy", **engine_kwargs)


def rows(events) -> list[tuple[str, int, int]]:
    return [(e.status, e.num_computed_tokens, e.num_tokens) for e in events or []]


def same_rows(events, expected: list[tuple[str, int, int]], why: str) -> None:
    got = rows(events)
    assert got == expected, f"{why}\nexpected {expected}\ncame     {got}"


def test_first_event_is_running_after_prefill(lab):
    events = run(lab, "hello")
    assert events, "one step at least ran, so there must be an event; the trace came back empty"
    first = events[0]
    assert (first.status, first.num_computed_tokens) == ("RUNNING", 5), (
        "the first event follows the first step, which admitted the request and computed all 5 "
        "prompt tokens: ('RUNNING', 5). A snapshot before the step would show WAITING and 0.\n"
        f"came {(first.status, first.num_computed_tokens)}"
    )


def test_the_exact_trace_of_hello(lab):
    same_rows(
        run(lab, "hello"),
        HELLO,
        "'hello', max_tokens=4: 5 prompt tokens in one step, which samples too, then one per step",
    )


def test_finishes_at_length_cap(lab):
    got = rows(run(lab, "hello"))
    assert got and got[-1] == ("FINISHED_LENGTH", 8, 9), (
        "the last event is the finished request. It has left `running`, so only the list that "
        "step() returned still holds it: 5 + 4 = 9 tokens, the ninth never computed.\n"
        f"came {got[-1:] or 'no event'}"
    )


def test_counters_monotonic_and_decode_by_one(lab):
    got = rows(run(lab, "the quick brown fox", 6))
    computed = [row[1] for row in got]
    assert computed == [19, 20, 21, 22, 23, 24], (
        "19 prompt tokens, then one more computed token per step: each row must hold the value of "
        f"its own step.\nexpected [19, 20, 21, 22, 23, 24]\ncame     {computed}"
    )
    behind = [num_tokens - num_computed for _, num_computed, num_tokens in got]
    assert behind == [1] * 6, (
        "after every step that samples, exactly the newest token is not computed yet: num_tokens - "
        f"num_computed_tokens is 1; came {behind}"
    )


def test_total_decode_steps_equals_max_tokens(lab):
    for max_tokens in (1, 2, 7, 16):
        events = run(lab, "hello", max_tokens)
        came = len(events or [])
        assert came == max_tokens, (
            f"a prompt that fits one step and max_tokens={max_tokens}: the prefill step samples "
            f"the first token, so {max_tokens} steps, not {max_tokens} + 1; came {came} events"
        )


def test_the_prompt_goes_in_as_it_is(lab):
    same_rows(
        run(lab, " hi\n", 2),
        [("RUNNING", 4, 5), ("FINISHED_LENGTH", 5, 6)],
        "' hi' and a line break are 4 bytes, so 4 tokens: white space is text",
    )


def test_the_request_is_greedy(lab, monkeypatch):
    seen = []
    add_request = LLMEngine.add_request

    def watch(self, *arguments, **named):
        seen.extend(a for a in (*arguments, *named.values()) if hasattr(a, "temperature"))
        return add_request(self, *arguments, **named)

    monkeypatch.setattr(LLMEngine, "add_request", watch)
    run(lab, "hello", 3)
    got = [(params.temperature, params.max_tokens, params.ignore_eos) for params in seen]
    assert got == [(0.0, 3, True)], (
        "one request, (temperature, max_tokens, ignore_eos): a trace that samples at random is "
        f"another one every time.\nexpected [(0.0, 3, True)]\ncame     {got}"
    )


def test_a_chunked_prompt_takes_more_steps(lab):
    expected = [
        ("RUNNING", 2, 10),
        ("RUNNING", 4, 10),
        ("RUNNING", 6, 10),
        ("RUNNING", 8, 10),
        ("RUNNING", 10, 11),
        ("RUNNING", 11, 12),
        ("RUNNING", 12, 13),
        ("FINISHED_LENGTH", 13, 14),
    ]
    same_rows(
        run(lab, "0123456789", long_prefill_token_threshold=2),
        expected,
        "10 prompt tokens, 2 per step: a step is a turn of the engine, not a token. The fifth "
        "chunk ends the prompt, so it samples",
    )


def test_max_tokens_one_is_a_single_event(lab):
    same_rows(
        run(lab, "hello", 1),
        [("FINISHED_LENGTH", 5, 6)],
        "one output token: admitted, computed, sampled and finished in the same step, so it was "
        "never seen as RUNNING",
    )


def test_events_are_copies(lab):
    class Live:
        request_id = "r"
        num_computed_tokens = 3
        num_tokens = 4

        class status:
            name = "RUNNING"

    event = lab.snapshot(Live)
    Live.num_computed_tokens, Live.num_tokens, Live.status.name = 30, 40, "FINISHED_LENGTH"
    assert event == ("r", "RUNNING", 3, 4), (
        "an event keeps the values of its moment; the request changed afterwards and the event "
        f"must not.\nexpected ('r', 'RUNNING', 3, 4)\ncame     {event}"
    )
    events = run(lab, "hello")
    assert all(type(event.status) is str for event in events), (
        f"status is the name of the enum member, a str such as 'RUNNING'; came {events}"
    )


def test_one_request_keeps_one_id(lab):
    first = run(lab, "hello")
    second = run(lab, "hello")
    ids = ({e.request_id for e in first}, {e.request_id for e in second})
    assert len(ids[0]) == len(ids[1]) == 1, f"one request, one id in all its events; came {ids}"
    assert ids[0] != ids[1], (
        "ids come from a counter that all engines share, so the second trace has another one; "
        f"came {ids}. Read the id from the request"
    )


def test_engine_kwargs_are_forwarded(lab):
    same_rows(
        run(lab, "hello", 2, max_num_batched_tokens=3),
        [("RUNNING", 3, 5), ("RUNNING", 5, 6), ("FINISHED_LENGTH", 6, 7)],
        "a budget of 3 tokens per step must reach the engine: 5 prompt tokens are 3 and 2",
    )
    with pytest.raises(ValueError, match="block_size") as refused:
        run(lab, "hello", block_size=0)
    assert refused.type is ValueError, "the engine's own refusal must come through"


def test_eos_does_not_end_the_trace(lab):
    class AlwaysEos:
        """A model that says EOS (256) and nothing else."""

        def forward(self, batch):
            import numpy as np

            logits = np.zeros((batch.num_reqs, 257))
            logits[:, 256] = 1.0
            return logits

    same_rows(
        lab.trace_request("hello", 4, model=AlwaysEos()),
        HELLO,
        "with ignore_eos=True a model that says EOS at once still runs to max_tokens; the length "
        "of a trace must not depend on what the model says",
    )


def test_the_engine_is_stepped_by_you(lab, monkeypatch):
    steps = []
    real_step = LLMEngine.step
    monkeypatch.setattr(LLMEngine, "step", lambda self: steps.append(1) or real_step(self))
    monkeypatch.setattr(LLMEngine, "generate", None)
    events = run(lab, "hello", 4)
    assert len(events) == len(steps) == 4, (
        "four steps, one event each. generate() runs them all before you can look; "
        f"came {len(events)} events of {len(steps)} steps"
    )


@pytest.mark.slow
def test_the_formula_predicts_every_trace(lab):
    for num_prompt in (1, 2, 3, 7, 8, 9, 16, 39):
        for chunk in (1, 2, 3, 5, 8, 100):
            for max_tokens in (1, 4):
                predicted = lab.predict_num_events(num_prompt, max_tokens, chunk)
                came = len(run(lab, "x" * num_prompt, max_tokens, max_num_batched_tokens=chunk))
                assert predicted == came, (
                    f"{num_prompt} prompt tokens, {chunk} per step, {max_tokens} outputs: the "
                    f"engine took {came} steps, predict_num_events says {predicted}. "
                    "ceil(P / chunk) + max_tokens - 1"
                )
    got = lab.predict_num_events(1, 4, 100_000), lab.predict_num_events(100_001, 1, 100_000)
    assert got == (4, 2), f"a chunk of 100,000: 1 and 100,001 tokens take (4, 2) events; came {got}"
    bad_ones = {"num_prompt_tokens": (0, 4, 8), "max_tokens": (5, 0, 8), "chunk": (5, 4, 0)}
    for name, bad in bad_ones.items():
        try:
            got = lab.predict_num_events(*bad)
        except ValueError as error:
            assert name in str(error), f"the refusal names {name}; it says: {error}"
            continue
        pytest.fail(f"predict_num_events{bad} must raise ValueError; it gave {got!r}")


def test_bad_parameters_are_refused(lab):
    for max_tokens in (0, -1):
        try:
            got = run(lab, "hello", max_tokens)
        except ValueError as error:
            assert "max_tokens" in str(error), f"the refusal names max_tokens; it says: {error}"
            continue
        pytest.fail(f"max_tokens={max_tokens} must raise ValueError; it gave {got!r}")
