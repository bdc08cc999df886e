"""What lab 01-05 pins: the order of the stop checks, on every short stream there is."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import parts
from mini_vllm import LLMEngine, Request, RequestStatus, SamplingParams

E = 256


def ran(lab, stream, max_tokens: int, max_model_len: int | None = None, **more):
    """(outputs, reason) of a scripted stream."""
    params = SamplingParams(max_tokens=max_tokens, **more)
    request = lab.run_until_stop(stream, E, params, max_model_len)
    return request.output_token_ids, lab.finish_reason(request)


def same(got, expected, why: str) -> None:
    assert got == expected, f"{why}\nexpected (outputs, reason) {expected}\ncame     {got}"


def test_eos_stops_generation(lab):
    same(
        ran(lab, [10, 20, E, 30, 40], 10),
        ([10, 20, E], "stop"),
        "EOS as third token ends the request. It is an output token and stays in the list",
    )
    same(ran(lab, [E], 1), ([E], "stop"), "EOS at once is an answer too: an empty text")


def test_ignore_eos_runs_to_length_cap(lab):
    same(
        ran(lab, [10, E, 20, E, 30], 4, ignore_eos=True),
        ([10, E, 20, E], "length"),
        "with ignore_eos the EOS tokens count like any other, and only the cap ends it",
    )


def test_no_eos_hits_length_cap(lab):
    same(
        ran(lab, [1, 2, 3, 4, 5, 6], 4),
        ([1, 2, 3, 4], "length"),
        "max_tokens counts output tokens, not the prompt, and is reached, not passed",
    )
    same(ran(lab, [10, 20, 30, E], 3), ([10, 20, 30], "length"), "EOS would come one token late")


def test_one_token_around_the_cap(lab):
    expected = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 5}
    for max_tokens, count in expected.items():
        reason = "length" if max_tokens <= 5 else None
        same(
            ran(lab, [1, 2, 3, 4, 5], max_tokens),
            ([1, 2, 3, 4, 5][:count], reason),
            f"a stream of 5 tokens, max_tokens={max_tokens}",
        )


def test_eos_on_the_boundary_reports_stop(lab, record_property):
    same(
        ran(lab, [10, 20, E], 3),
        ([10, 20, E], "stop"),
        "EOS is token number max_tokens: both ends apply, EOS is asked first. The answer is "
        "complete, and 'length' would tell the caller that it was cut",
    )
    same(
        ran(lab, [10, 20, E], 3, ignore_eos=True),
        ([10, 20, E], "length"),
        "the same stream with ignore_eos",
    )
    record_property("measured.tie", ran(lab, [10, 20, E], 3)[1])


def test_unfinished_request_has_no_reason(lab):
    same(
        ran(lab, [1, 2], 5), ([1, 2], None), "the stream ran dry first: no reason, not an empty one"
    )
    same(ran(lab, [], 5), ([], None), "no token at all")
    request = lab.run_until_stop([1, 2], E, SamplingParams(max_tokens=5))
    assert request.status is RequestStatus.RUNNING, (
        f"a request that is being generated is RUNNING; came {request.status!r}"
    )
    got = lab.stop_status(ended_with([], SamplingParams(max_tokens=5)), 2)
    assert got is None, (
        "no output yet, and the prompt of 2 fills max_model_len=2: there is no last token to look "
        f"at, so nothing ends here; expected None, came {got!r}"
    )


def test_nothing_is_pulled_past_the_end(lab):
    for stream, max_tokens, left in (([10, E, 20, 30], 9, [20, 30]), ([1, 2, 3, 4], 2, [3, 4])):
        pulled = iter(stream)
        lab.run_until_stop(pulled, E, SamplingParams(max_tokens=max_tokens))
        rest = list(pulled)
        assert rest == left, (
            f"stream {stream}, max_tokens={max_tokens}: the tokens after the end are not ours. In "
            f"an engine, pulling one is a step of the model.\nexpected left {left}\ncame     {rest}"
        )


def test_every_status_has_a_defined_reason(lab):
    expected = {
        "WAITING": None,
        "RUNNING": None,
        "PREEMPTED": None,
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_ERROR": "error",
        "FINISHED_REPETITION": "repetition",
    }

    class Bare:
        """A request of which only the status is known."""

        def __init__(self, status: RequestStatus) -> None:
            self.status = status

    got = {status.name: lab.finish_reason(Bare(status)) for status in RequestStatus}
    assert got == expected, (
        "every status has its reason; a preempted request is not finished, it comes back.\n"
        f"expected {expected}\ncame     {got}"
    )


def test_the_order_of_the_statuses_is_load_bearing(lab):
    class Bare:
        def __init__(self, status: RequestStatus) -> None:
            self.status = status

    for status in RequestStatus:
        finished = status > RequestStatus.PREEMPTED
        reason = lab.finish_reason(Bare(status))
        assert (reason is not None) is finished, (
            f"{status.name}: finished is whatever compares greater than PREEMPTED, and exactly "
            f"those have a reason; came {reason!r}"
        )
    try:
        reason = lab.finish_reason(Bare("WAITING_FOR_GRAMMAR"))
    except ValueError:
        return
    except Exception as error:
        reason = error
    pytest.fail(
        "a status nobody has told you about, here the text 'WAITING_FOR_GRAMMAR', must raise "
        f"ValueError: compare a status with those you know and ask nothing else of it.\n"
        f"expected ValueError\ncame     {reason!r}",
        pytrace=False,
    )


def test_a_terminal_status_stays(lab):
    request = lab.run_until_stop([10, E, 20], E, SamplingParams(max_tokens=5))
    assert request.status is RequestStatus.FINISHED_STOPPED, (
        f"ended by EOS; came {request.status!r}"
    )
    request.maybe_finish()
    assert lab.finish_reason(request) == "stop", (
        "asking again must not change why it ended; came " + repr(lab.finish_reason(request))
    )


def test_the_model_length_ends_a_stream(lab):
    same(
        ran(lab, [1, 2, 3, 4], 10, max_model_len=5),
        ([1, 2, 3], "length"),
        "the prompt of 2 and 3 outputs fill a model of 5 tokens, well below max_tokens=10",
    )


def ended_with(tokens, params: SamplingParams, num_prompt: int = 2) -> Request:
    request = Request("r", [7] * num_prompt, params, eos_token_id=2)
    for token in tokens:
        request.append_output_token(token)
    return request


def test_min_tokens_is_asked_first(lab):
    params = SamplingParams(max_tokens=4, min_tokens=3, stop_token_ids=(5,))
    for tokens, expected in (
        ([2], None),
        ([7, 5], None),
        ([7, 7, 2], RequestStatus.FINISHED_STOPPED),
        ([7, 7, 5], RequestStatus.FINISHED_STOPPED),
        ([7, 7, 7], None),
        ([2, 2, 7, 7], RequestStatus.FINISHED_LENGTH),
        ([], None),
    ):
        got = lab.stop_status(ended_with(tokens, params))
        assert got is expected, (
            f"min_tokens=3, EOS 2, stop id 5, outputs {tokens}: expected {expected!r}, came {got!r}"
        )


def test_any_id_can_be_eos(lab):
    params = SamplingParams(max_tokens=5)
    for eos, last, expected in (
        (0, 0, RequestStatus.FINISHED_STOPPED),
        (0, 9, None),
        (None, 0, None),
        (None, 2, None),
    ):
        request = Request("r", [7, 7], params, eos_token_id=eos)
        request.append_output_token(last)
        got = lab.stop_status(request)
        assert got is expected, (
            f"eos_token_id={eos}, last output {last}: expected {expected!r}, came {got!r}. Id 0 is "
            "an id like any other, and only None means that there is no EOS"
        )
    for stop_id in (0, 5):
        params = SamplingParams(max_tokens=5, stop_token_ids=(stop_id,))
        got = lab.stop_status(ended_with([7, stop_id], params))
        assert got is RequestStatus.FINISHED_STOPPED, (
            f"stop id {stop_id} ends the request, id 0 as well; came {got!r}"
        )
    for eos in (0, 2):
        request = lab.run_until_stop([9, eos, 9], eos, SamplingParams(max_tokens=5))
        assert request.output_token_ids == [9, eos], (
            f"EOS {eos} as second token ends the stream; expected {[9, eos]}, came "
            f"{request.output_token_ids}"
        )


def test_what_the_prompt_holds_ends_nothing(lab):
    params = SamplingParams(max_tokens=5, stop_token_ids=(5,))
    for prompt in ([2, 5], [7, 2], [7, 5]):
        request = Request("r", prompt, params, eos_token_id=2)
        got = [lab.stop_status(request)]
        request.append_output_token(7)
        got.append(lab.stop_status(request))
        assert got == [None, None], (
            f"prompt {prompt}, EOS 2, stop id 5: only the last output can stop a request. A chat "
            "template puts EOS between the turns of every prompt; expected [None, None] before and "
            f"after the output 7, came {got}"
        )


def test_max_model_len_counts_the_prompt(lab):
    params = SamplingParams(max_tokens=10)
    for max_model_len, expected in (
        (6, None),
        (5, RequestStatus.FINISHED_LENGTH),
        (4, RequestStatus.FINISHED_LENGTH),
        (None, None),
    ):
        got = lab.stop_status(ended_with([7, 7, 7], params), max_model_len)
        assert got is expected, (
            f"2 prompt and 3 output tokens, max_model_len={max_model_len}: expected {expected!r}, "
            f"came {got!r}. max_tokens counts outputs, max_model_len the whole sequence"
        )
    got = lab.stop_status(ended_with([7, 7, 2], params), 5)
    assert got is RequestStatus.FINISHED_STOPPED, (
        f"EOS on the last position of the model is still a complete answer: 'stop'; came {got!r}"
    )


class ReadOnly:
    """A request that can be read and answers nothing itself."""

    def __init__(self, request: Request) -> None:
        self.__dict__["_request"] = request

    def __getattr__(self, name: str):
        if name == "maybe_finish" or name.startswith("__"):
            raise AttributeError(f"{name} is not for stop_status")
        value = getattr(self._request, name)
        return tuple(value) if isinstance(value, list) else value

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} may not be set")


def test_the_check_is_your_own(lab):
    for tokens, expected in (([7, 2], RequestStatus.FINISHED_STOPPED), ([7], None)):
        request = ReadOnly(ended_with(tokens, SamplingParams(max_tokens=3)))
        try:
            got = lab.stop_status(request)
        except (AttributeError, TypeError) as error:
            pytest.fail(
                f"outputs {tokens}: stop_status reads the request's data and decides by itself. It "
                "does not ask maybe_finish, not on a copy either, because then it compares the "
                f"engine with the engine, and sets nothing; it failed with: {error}",
                pytrace=False,
            )
        assert got is expected, f"outputs {tokens}, EOS 2: expected {expected!r}, came {got!r}"


def test_the_check_changes_nothing(lab):
    request = ended_with([7, 2], SamplingParams(max_tokens=2))
    got = lab.stop_status(request, 4)
    assert (got, request.status) == (RequestStatus.FINISHED_STOPPED, RequestStatus.WAITING), (
        "stop_status answers, it does not act: the status is still the one the request had; came "
        f"{(got, request.status)}"
    )


@pytest.mark.slow
def test_every_short_stream_stops_as_in_the_real_check(lab):
    cases = parts.load("check_stop")
    reasons = {
        None: None,
        RequestStatus.FINISHED_STOPPED: "stop",
        RequestStatus.FINISHED_LENGTH: "length",
    }
    for number, case in enumerate(cases):
        params = SamplingParams(
            max_tokens=case["max_tokens"],
            min_tokens=case["min_tokens"],
            ignore_eos=case["ignore_eos"],
            stop_token_ids=tuple(case["stop_token_ids"]),
        )
        request = ended_with(case["output_token_ids"], params, case["num_prompt_tokens"])
        got = lab.stop_status(request, case["max_model_len"])
        assert got in reasons and reasons[got] == case["reason"], (
            f"recorded stream {number} of {len(cases)}: the real check_stop says "
            f"{case['reason']!r}, stop_status {got!r}, for {case} (EOS is 2)"
        )
    assert len(cases) == 10_920, (
        f"39 streams under 280 settings are 10,920 cases; the recording has {len(cases)}"
    )


class Saying:
    """A model whose greedy token at output position i is `tokens[i]`, the last one for ever."""

    def __init__(self, num_prompt: int, tokens: list[int]) -> None:
        self.num_prompt, self.tokens = num_prompt, tokens

    def forward(self, batch) -> np.ndarray:
        logits = np.zeros((batch.num_reqs, 257))
        for row, index in enumerate(batch.logits_indices):
            position = int(batch.positions[index]) + 1 - self.num_prompt
            # The second choice, one unit below, is "x".
            logits[row, ord("x")] = 1.0
            logits[row, self.tokens[min(max(position, 0), len(self.tokens) - 1)]] = 2.0
        return logits


def finished_request(model, params: SamplingParams, **engine_kwargs) -> Request:
    engine = LLMEngine(model=model, **engine_kwargs)
    engine.add_request("ab", params)
    for _ in range(50):
        for request in engine.step():
            return request
    pytest.fail("the engine did not finish the request in 50 steps", pytrace=False)


def test_engine_reports_length_with_ignore_eos(lab):
    for ignore_eos, expected in ((True, ([97, E, 97, 97], "length")), (False, ([97, E], "stop"))):
        params = SamplingParams(max_tokens=4, ignore_eos=ignore_eos)
        request = finished_request(Saying(2, [97, E, 97]), params)
        same(
            (request.output_token_ids, lab.finish_reason(request)),
            expected,
            f"the whole engine, a model that says 'a', EOS, 'a', 'a', ignore_eos={ignore_eos}",
        )


def test_min_tokens_has_two_readings(lab):
    params = SamplingParams(max_tokens=8, min_tokens=2)
    scripted = lab.run_until_stop([E, E, E, E], E, params)
    same(
        (scripted.output_token_ids, lab.finish_reason(scripted)),
        ([E, E], "stop"),
        "the stop check alone accepts EOS as token number min_tokens",
    )
    request = finished_request(Saying(2, [E]), params)
    same(
        (request.output_token_ids, lab.finish_reason(request)),
        ([ord("x"), ord("x"), E], "stop"),
        "in the engine the sampler masks EOS while fewer than min_tokens outputs exist, so EOS "
        "can come as token min_tokens + 1 at the earliest",
    )


def test_min_tokens_beyond_the_model_length_never_stops(lab, record_property):
    params = SamplingParams(max_tokens=10, min_tokens=6)
    for count, expected in ((4, None), (5, None), (6, RequestStatus.FINISHED_LENGTH)):
        request = ended_with([7] * count, params, num_prompt=4)
        got = lab.stop_status(request, 8)
        assert got is expected, (
            f"4 prompt and {count} output tokens, max_model_len=8, min_tokens=6: below min_tokens "
            f"nothing stops a request, not even the end of the model; expected {expected!r}, came "
            f"{got!r}"
        )
        if count == 4:
            record_property(
                "measured.min_tokens", "nothing" if got is None else "the model's length"
            )
    engine = LLMEngine(model=Saying(2, [97]), max_model_len=6)
    with pytest.raises(ValueError, match="min_tokens=6: after a prompt of 2 tokens") as refused:
        engine.add_request("ab", SamplingParams(max_tokens=10, min_tokens=6))
    assert refused.type is ValueError, "the mini engine refuses what the real one would spin on"


def test_abort_is_the_third_ending(lab):
    engine = LLMEngine(model="toy", num_blocks=20)
    request_id = engine.add_request("hello", SamplingParams(max_tokens=9, ignore_eos=True))
    request = engine.requests[request_id]
    engine.step()
    before = lab.finish_reason(request)
    engine.abort_request(request_id)
    got = (before, lab.finish_reason(request), engine.scheduler.kv.block_pool.get_num_free_blocks())
    assert got == (None, "abort", 19), (
        "the caller went away: the request has a reason and its blocks are free again.\n"
        f"expected (None, 'abort', 19)\ncame     {got}"
    )


@pytest.mark.upstream
def test_the_real_scheduler_stalls_as_well(lab):
    from conformance import real

    config = {
        "num_blocks": 64, "block_size": 4, "enable_prefix_caching": False, "max_num_seqs": 4,
        "max_num_batched_tokens": 16, "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": True, "max_model_len": 8, "policy": "fcfs",
    }  # fmt: skip
    scheduler = real.make_scheduler(config)
    params = real.SamplingParams(max_tokens=10, min_tokens=6)
    params.update_from_generation_config({}, 2)
    request = real.Request("r", [7] * 4, params, None)
    scheduler.add_request(request)
    planned = []
    for _ in range(8):
        plan = scheduler.schedule()
        planned.append(dict(plan.num_scheduled_tokens))
        sampled = dict.fromkeys(plan.num_scheduled_tokens, 7)
        scheduler.update_from_output(plan, real.runner_output(plan, sampled))
    assert planned == [{"r": 4}, {"r": 1}, {"r": 1}, {"r": 1}, {}, {}, {}, {}], (
        "4 prompt tokens, max_model_len=8, min_tokens=6: the fourth output fills the model, and "
        f"from then on nothing can be planned; came {planned}"
    )
    mine = ended_with([7] * 4, SamplingParams(max_tokens=10, min_tokens=6), num_prompt=4)
    assert (lab.stop_status(mine, 8), scheduler.has_unfinished_requests()) == (None, True), (
        "no stop check fires and the request is still there: the real engine would plan nothing, "
        "step after step"
    )
