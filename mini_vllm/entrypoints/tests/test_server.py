"""The server: what it lets in, what it bounds, who is told what, and how it ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mini_vllm.tests.server_support import ask, events, run_alone, serving, wait_until  # isort: skip

from mini_vllm.engine import LLMEngine  # isort: skip
from mini_vllm.entrypoints.async_llm import AsyncLLM, Delta, EngineDead  # isort: skip
from mini_vllm.entrypoints.openai.launch import check_open, serve_engine  # isort: skip
from mini_vllm.sampling_params import SamplingParams  # isort: skip

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def make_engine(**knobs: Any) -> LLMEngine:
    return LLMEngine("byte-llama", **{"num_blocks": 256, "max_model_len": 512, **knobs})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(make_engine(), chat_template=TEMPLATE, tool_call_parser="hermes") as (found, _):
        yield found


def used(engine: LLMEngine) -> float:
    return engine.scheduler.kv.block_pool.get_usage()


def begin_stream(port: int, max_tokens: int = 400) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"prompt": "The", "max_tokens": max_tokens, "stream": True, "temperature": 0}
    body |= {"ignore_eos": True}
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    answer.connection = connection  # type: ignore[attr-defined]
    return answer


def test_a_stream_joined_is_the_whole_answer(port: int) -> None:
    body = {"prompt": "The scheduler", "max_tokens": 24, "temperature": 0}
    _, whole = ask(port, COMPLETIONS, body)
    _, streamed = ask(port, COMPLETIONS, body | {"stream": True})
    *chunks, done = events(streamed)
    assert done == "[DONE]"
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == whole["choices"][0]["text"]
    assert len(pieces) > 1, "what is there is told, and not only when all is"


def test_many_clients_get_what_each_gets_alone(port: int) -> None:
    bodies = [{"prompt": f"Step {i}:", "max_tokens": 12, "temperature": 0} for i in range(16)]
    alone = [ask(port, COMPLETIONS, body)[1]["choices"][0]["text"] for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda body: ask(port, COMPLETIONS, body)[1], bodies))
    assert [answer["choices"][0]["text"] for answer in together] == alone


def test_a_client_that_leaves_a_stream_frees_its_blocks() -> None:
    engine = make_engine()
    with serving(engine) as (port, _):
        answer = begin_stream(port)
        wait_until(lambda: used(engine) > 0)
        answer.connection.sock.close()  # type: ignore[attr-defined]
        answer.close()
        wait_until(lambda: not engine.requests)
        assert used(engine) == 0


def test_a_client_that_leaves_before_the_answer_frees_its_blocks() -> None:
    engine = make_engine()
    with serving(engine) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = {"prompt": "The", "max_tokens": 400, "ignore_eos": True}
        connection.request(
            "POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"}
        )
        wait_until(lambda: used(engine) > 0)
        connection.close()
        wait_until(lambda: not engine.requests)
        assert used(engine) == 0


def test_more_requests_than_allowed_are_told_so_and_the_others_go_on() -> None:
    with serving(make_engine(), max_concurrent=2) as (port, _):
        held = [begin_stream(port), begin_stream(port)]
        status, body = ask(port, COMPLETIONS, {"prompt": "a"})
        assert (status, body["error"]["code"]) == (429, 429)
        assert ask(port, "/load") == (200, {"server_load": 2})
        assert b"[DONE]" in held[0].read()
        held[1].close()
        held[1].connection.close()  # type: ignore[attr-defined]
        wait_until(lambda: ask(port, "/load")[1] == {"server_load": 0})
        assert ask(port, COMPLETIONS, {"prompt": "a"})[0] == 200


def test_a_key_is_needed_below_v1_and_nowhere_else() -> None:
    with serving(make_engine(), keys=("one", "two")) as (port, _):
        assert ask(port, "/v1/models")[0] == 401
        assert ask(port, "/v1/models", key="onex")[0] == 401
        assert ask(port, "/v1/models", headers={"Authorization": "Basic one"})[0] == 401
        assert ask(port, "/v1/models", key="two")[0] == 200
        assert ask(port, "/health")[0] == 200


def test_listening_to_others_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.3", "somewhere.example"):
        with pytest.raises(ValueError, match="need an api_key"):
            check_open(host, ())
        check_open(host, ("key",))
        with pytest.raises(ValueError, match="need an api_key"):
            check_open(host, ("",))
    for host in ("127.0.0.1", "::1", "localhost"):
        check_open(host, ())


def test_a_body_that_is_too_large_is_refused_before_it_is_read_whole(port: int) -> None:
    status, body = ask(port, COMPLETIONS, {"prompt": "x" * (5 * 2**20)})
    assert (status, body["error"]["code"]) == (413, 413)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "model": "nope"}, "model"),
        (COMPLETIONS, {"prompt": "w" * 600}, "input_tokens"),
        (COMPLETIONS, {"prompt": "w" * 60000}, "input_text"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 600}, "truncate_prompt_tokens"),
        (CHATS, {"messages": [{"role": "user", "content": "a"}], "top_p": 2}, "top_p"),
        (
            CHATS,
            {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1},
            "top_logprobs",
        ),
    ],
)
def test_what_is_refused_names_its_field(port: int, path: str, body: Any, param: str) -> None:
    status, answer = ask(port, path, body)
    assert status in (400, 404)
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [[1]] * 1025}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 32}, "prompt"),
        ({"prompt": "a", "n": 1025}, "n"),
        ({"prompt": "a", "stop": ["q"] * 1025}, "stop"),
        ({"prompt": "a", "suffix": [[1]] * 200_000}, None),
    ],
)
def test_what_is_too_much_together_is_refused_with_the_bound(
    port: int, body: Any, param: str | None
) -> None:
    status, answer = ask(port, COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "need at most" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"truncate_prompt_tokens": 5}, "efgh\n"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, "abcde"),
        ({"truncate_prompt_tokens": 0}, None),
        ({"truncate_prompt_tokens": -1}, "abcdefgh\n"),
    ],
)
def test_a_prompt_that_is_cut_keeps_its_end(port: int, asked: Any, kept: str | None) -> None:
    body = {"prompt": "abcdefgh\n", "max_tokens": 1, "return_token_ids": True}
    status, answer = ask(port, COMPLETIONS, body | asked)
    assert status == (200 if kept else 400)
    if kept:
        assert bytes(answer["choices"][0]["prompt_token_ids"]).decode() == kept


def forced(text: str, max_tokens: int) -> dict[str, Any]:
    """A completion that can say nothing but `text`, of at most so many bytes."""
    only = {"structured_outputs": {"choice": [text]}, "max_tokens": max_tokens}
    return {"prompt": "a", "temperature": 0, **only}


@pytest.mark.parametrize("stream", [False, True])
def test_a_character_that_the_cap_cuts_is_not_in_the_text(port: int, stream: bool) -> None:
    status, answer = ask(port, COMPLETIONS, forced("ab\N{ROCKET}", 4) | {"stream": stream})
    assert status == 200
    chunks = events(answer)[:-1] if stream else [answer]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"


YES = {"type": "json_schema", "json_schema": {"enum": ["yes"]}}
ONE_TAG = {
    "type": "triggered_tags", "triggers": ["<a"], "at_least_one": True, "stop_after_first": True,
    "tags": [{"type": "tag", "begin": "<a>", "content": YES, "end": "</a>"}],
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_structural_tag_is_a_response_format(port: int, path: str) -> None:
    said = {"messages": [{"role": "user", "content": "a"}]} if path == CHATS else {"prompt": "a"}
    form = {"type": "structural_tag", "format": ONE_TAG}
    status, answer = ask(port, path, said | {"response_format": form, "max_tokens": 20})
    [choice] = answer["choices"]
    assert status == 200 and choice["finish_reason"] == "stop"
    assert (choice.get("text") or choice["message"]["content"]) == '<a>"yes"</a>'
    refused = form | {"format": {"type": "regex", "pattern": "a"}}
    status, answer = ask(port, path, said | {"response_format": refused})
    assert status == 400 and "format 'regex': need one of" in answer["error"]["message"]


def test_the_first_token_of_a_prompt_is_no_context_of_the_others(port: int) -> None:
    body = {"prompt": "\N{ROCKET}ab", "echo": True, "logprobs": 1, "max_tokens": 1}
    _, answer = ask(port, COMPLETIONS, body)
    noted = answer["choices"][0]["logprobs"]
    assert noted["tokens"][:6] == ["\ufffd", "", "", "", "a", "b"]
    assert noted["text_offset"][:6] == [0, 1, 1, 1, 1, 2]


def test_a_thinking_budget_is_refused_where_the_engine_has_no_marks(port: int) -> None:
    status, answer = ask(port, COMPLETIONS, {"prompt": "a", "thinking_token_budget": 3})
    assert (status, answer["error"]["type"]) == (400, "BadRequestError")
    assert "need an engine with reasoning_config" in answer["error"]["message"]


def test_a_thinking_budget_ends_the_block_that_the_prompt_leaves_open() -> None:
    marks = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    body = {"prompt": "a <think>", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with serving(make_engine(reasoning_config=marks)) as (port, _):
        texts = [
            ask(port, COMPLETIONS, body | more)[1]["choices"][0]["text"]
            for more in ({}, {"thinking_token_budget": 2}, {"thinking_token_budget": -1})
        ]
    assert ["</think>" in text for text in texts] == [False, True, False]


def test_a_text_may_hold_more_commas_than_a_body_may_hold_values(port: int) -> None:
    body = {"prompt": "a," * 200_000, "truncate_prompt_tokens": 8, "max_tokens": 1}
    assert ask(port, COMPLETIONS, body)[0] == 200


def held(engine: LLMEngine) -> tuple[threading.Event, threading.Event]:
    """What parses constraints waits for the second event, and sets the first when it does."""
    began, go_on = threading.Event(), threading.Event()
    prepare = engine.prepare

    def wait(sampling_params: SamplingParams) -> None:
        began.set()
        assert go_on.wait(30)
        prepare(sampling_params)

    engine.prepare = wait  # type: ignore[method-assign]
    return began, go_on


def begin_whole(port: int, body: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    return connection


CONSTRAINED = {"prompt": "a", "max_tokens": 9, "structured_outputs": {"choice": ["one", "two"]}}


def test_a_constraint_is_parsed_beside_the_requests_of_others() -> None:
    engine = make_engine()
    began, go_on = held(engine)
    with serving(engine) as (port, _):
        waiting = begin_whole(port, CONSTRAINED)
        assert began.wait(30)
        assert ask(port, COMPLETIONS, {"prompt": "a", "max_tokens": 3})[0] == 200
        go_on.set()
        said = json.loads(waiting.getresponse().read())["choices"][0]["text"]
        waiting.close()
    assert said in ("one", "two")


def test_a_client_that_leaves_while_its_constraint_is_parsed_leaves_nothing() -> None:
    engine = make_engine()
    began, go_on = held(engine)
    with serving(engine) as (port, served):
        waiting = begin_whole(port, CONSTRAINED)
        assert began.wait(30)
        waiting.close()
        wait_until(lambda: not served.engine._streams)
        go_on.set()
        assert ask(port, COMPLETIONS, CONSTRAINED)[0] == 200
        assert not engine.requests
        assert engine.scheduler.kv.block_pool.get_usage() == 0


def test_beams_step_with_the_requests_of_others_and_end_when_their_client_leaves() -> None:
    engine, together = make_engine(), threading.Event()

    def note(plan: Any) -> None:
        kinds = {request.request_id.split("-")[1] for request in plan.scheduled_requests}
        if kinds >= {"beams", "other"}:
            together.set()

    engine.observers.append(note)
    with serving(engine) as (port, _):
        search = {"prompt": "a", "use_beam_search": True, "n": 4, "max_tokens": 480}
        beams = begin_whole(port, search | {"request_id": "beams", "ignore_eos": True})
        while not together.is_set():
            asked = {"prompt": "a", "max_tokens": 3, "request_id": "other"}
            assert ask(port, COMPLETIONS, asked)[0] == 200
        beams.close()
        wait_until(lambda: ask(port, "/load")[1] == {"server_load": 0})
        wait_until(lambda: not engine.requests)


@pytest.mark.parametrize("penalty", [1e308, -1e308])
def test_a_length_penalty_that_no_float_holds_is_the_clients_error(
    port: int, penalty: float
) -> None:
    search = {"prompt": "a", "use_beam_search": True, "max_tokens": 2, "length_penalty": penalty}
    status, answer = ask(port, COMPLETIONS, search)
    assert (status, answer["error"]["param"]) == (400, "length_penalty")


def test_the_gauges_of_a_server_whose_clients_have_left_are_zero() -> None:
    with serving(make_engine()) as (port, served):
        leaving = begin_stream(port)
        assert served.engine.stats.running == 1
        leaving.close()
        leaving.connection.close()  # type: ignore[attr-defined]
        wait_until(lambda: served.engine.stats.running == 0)
        _, text = ask(port, "/metrics")
        assert 'vllm:num_requests_running{engine="0",model_name="byte-llama"} 0.0' in text
        assert 'vllm:kv_cache_usage_perc{engine="0",model_name="byte-llama"} 0.0' in text
        assert 'finished_reason="abort",model_name="byte-llama"} 1.0' in text


def test_nothing_refused_reaches_the_engine() -> None:
    engine = make_engine()
    with serving(engine) as (port, _):
        asked = {"prompt": ["fine", "w" * 600], "max_tokens": 4}
        assert ask(port, COMPLETIONS, asked)[0] == 400
        assert not engine.requests


def test_a_request_without_a_token_left_is_the_clients_error(port: int) -> None:
    asked = {"prompt": "a", "allowed_token_ids": [97], "logit_bias": {}, "min_tokens": 2}
    asked |= {"stop_token_ids": [97], "max_tokens": 4}
    status, body = ask(port, COMPLETIONS, asked)
    assert (status, body["error"]["type"]) == (400, "BadRequestError")
    _, streamed = ask(port, COMPLETIONS, asked | {"stream": True})
    error, done = events(streamed)
    assert (error["error"]["code"], done) == (400, "[DONE]")


def test_metrics_count_what_was_done() -> None:
    with serving(make_engine()) as (port, _):
        for _ in range(2):
            ask(port, COMPLETIONS, {"prompt": "The scheduler is here", "max_tokens": 5, "seed": 1})
        _, text = ask(port, "/metrics")
        said = {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("vllm:") and "_bucket" not in line and "_created" not in line
        }
        assert said["vllm:prompt_tokens_total"] == 42
        assert said["vllm:generation_tokens_total"] == 10
        assert said["vllm:prefix_cache_queries_total"] == 42
        assert said["vllm:prefix_cache_hits_total"] == 16
        assert said["vllm:time_to_first_token_seconds_count"] == 2
        assert said["vllm:num_requests_running"] == 0


def test_an_engine_that_dies_is_said_and_health_tells() -> None:
    engine = make_engine()
    with serving(engine) as (port, _):

        def die(plan: Any) -> None:
            raise RuntimeError("the model is gone")

        engine.observers.append(die)
        status, body = ask(port, COMPLETIONS, {"prompt": "a"})
        assert (status, body["error"]["type"]) == (500, "InternalServerError")
        assert ask(port, "/health")[0] == 503
        assert ask(port, COMPLETIONS, {"prompt": "a"})[0] == 500


def test_a_server_that_ends_lets_the_answers_under_way_end() -> None:
    answers: list[bytes] = []
    engine = make_engine()
    with serving(engine) as (port, served):
        held = begin_stream(port, max_tokens=60)
        reader = threading.Thread(target=lambda: answers.append(held.read()))
        reader.start()
    reader.join(30)
    assert b"[DONE]" in answers[0]
    assert served.engine.error


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tool_call_parser": "other"}, "tool_call_parser='other'"),
        ({"lora_modules": {"a": "b"}}, "need enable_lora=True"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(options: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        serve_engine(make_engine(), model="byte-llama", **options)


def test_a_slow_reader_gets_several_steps_at_once_and_misses_nothing() -> None:
    async def read() -> tuple[list[Delta], str]:
        engine = make_engine()
        asking = AsyncLLM(engine)
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        stream = await asking.open("The scheduler", params, "slow")
        while stream.num_open:  # all has come, and not one delta was read
            await asyncio.sleep(0.005)
        deltas = [delta async for delta in stream.deltas()]
        await asyncio.to_thread(asking.close)
        return deltas, make_engine().generate(["The scheduler"], params)[0].outputs[0].text

    (delta,), whole = run_alone(read())
    assert (delta.text, len(delta.token_ids), delta.finish_reason) == (whole, 40, "length")


def test_who_asks_a_closed_engine_is_told() -> None:
    async def ask_closed() -> None:
        asking = AsyncLLM(make_engine())
        asking.close()
        with pytest.raises(EngineDead):
            await asking.open("a", SamplingParams(), "r")

    run_alone(ask_closed())


def test_a_stream_that_is_open_when_the_engine_closes_is_told() -> None:
    async def leave_open() -> None:
        asking = AsyncLLM(make_engine())
        stream = await asking.open("a", SamplingParams(max_tokens=400, ignore_eos=True), "r")
        await asyncio.to_thread(asking.close)
        with pytest.raises(EngineDead):
            async for _ in stream.deltas():
                pass

    run_alone(leave_open())
