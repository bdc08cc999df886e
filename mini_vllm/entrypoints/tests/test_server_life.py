"""The server around the routes: its parser's bounds, how it begins, how it ends."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mini_vllm.tests.server_support import (  # first: it may skip
    DEADLINE_S,
    ask,
    events,
    run_alone,
    serving,
    wait_until,
)

from mini_vllm.entrypoints.async_llm import AsyncLLM, EngineDead  # isort: skip
from mini_vllm.entrypoints.cli import app  # isort: skip
from mini_vllm.entrypoints.openai import launch  # isort: skip
from mini_vllm.entrypoints.openai.checkpoint import (  # isort: skip
    generation_defaults,
    names_of_tokens,
)
from mini_vllm.entrypoints.openai.http import BoundedH11, HTTPServer, listening  # isort: skip
from mini_vllm.sampling_params import SamplingParams  # isort: skip
from mini_vllm.entrypoints.tests.test_server import COMPLETIONS, begin_stream, make_engine  # isort: skip

HELLO = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def answer_to(port: int, *sent: bytes) -> bytes:
    """All that a server says to these bytes before it closes."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=30)) as client:
        said = b""
        try:
            for piece in sent:
                client.sendall(piece)
            while piece := client.recv(65536):
                said += piece
        except ConnectionError:
            pass  # it had heard enough
        return said


# ---------------------------------------------------------------------- headers


@pytest.mark.parametrize(
    "pieces",
    [
        [HELLO, b"X: ", *[b"a" * 65536] * 40],
        [HELLO, *[b"X: " + b"a" * 8000 + b"\r\n"] * 400],
        [b"GET /", *[b"a" * 65536] * 40],
    ],
    ids=["one endless header", "headers without end", "an endless path"],
)
def test_headers_are_bounded_whatever_they_are_made_of(pieces: list[bytes]) -> None:
    with serving(make_engine(), keys=("key",)) as (port, _):
        said = answer_to(port, *pieces)
        assert said == b"" or said.startswith(b"HTTP/1.1 400")
        assert ask(port, "/health")[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HELLO])
def test_a_request_whose_headers_do_not_end_is_given_up(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedH11, "header_s", 0.05)
    with serving(make_engine()) as (port, _):
        assert answer_to(port, sent) == b""


def test_a_request_has_at_most_so_many_headers_and_bytes_of_them() -> None:
    bounds = {"h11_max_header_count": 5, "h11_max_incomplete_event_size": 1000}
    end = b"Connection: close\r\n\r\n"
    with serving(make_engine(), http=bounds) as (port, _):
        said = [
            answer_to(port, HELLO, b"X: a\r\n" * 3, end),  # with `Host` they are five
            answer_to(port, HELLO, b"X: a\r\n" * 4, end),
            answer_to(port, HELLO + b"X: " + b"a" * 900 + b"\r\n", end),
            answer_to(port, HELLO + b"X: " + b"a" * 1000),
        ]
    assert [each[9:12] for each in said] == [b"200", b"400", b"200", b"400"]


def test_an_answer_has_the_request_id_that_was_sent_or_a_new_one() -> None:
    lines = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer "
    named = b"\r\nX-Request-Id: mine\r\n\r\n"
    with serving(make_engine(), keys=("key",), enable_request_id_headers=True) as (port, _):
        said = [
            answer_to(port, lines, key, rest).decode()
            for key in (b"key", b"another")
            for rest in (named, b"\r\n\r\n")
        ]
    assert [int(each.split()[1]) for each in said] == [200, 200, 401, 401]
    sent, made, *refused = (each.partition("x-request-id: ")[2].split()[0] for each in said)
    assert (sent, refused[0]) == ("mine", "mine")
    assert made != refused[1]
    assert re.fullmatch("[0-9a-f]{32}", made) and re.fullmatch("[0-9a-f]{32}", refused[1])


def test_headers_in_two_pieces_are_as_good_as_in_one() -> None:
    with serving(make_engine()) as (port, _):
        said = answer_to(port, HELLO, b"Connection: close\r\n", b"\r\n")
    assert said.startswith(b"HTTP/1.1 200")


# ---------------------------------------------------------------------- the beginning


def test_a_port_in_use_is_said_before_a_model_is_loaded() -> None:
    with closing(listening("127.0.0.1", 0)) as held:
        held.listen()
        port = held.getsockname()[1]
        ran = CliRunner().invoke(app, ["serve", "no-such-model", "--port", str(port)])
    assert ran.exit_code == 2
    assert f"port={port}: cannot listen there" in ran.output


@pytest.mark.parametrize("keys", [["--api-key", ""], []])
def test_an_empty_key_opens_nothing(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_VLLM_API_KEY", "")
    ran = CliRunner().invoke(app, ["serve", "no-such-model", "--host", "0.0.0.0", *keys])
    assert ran.exit_code == 2
    assert "need an api_key" in ran.output


@pytest.mark.parametrize(
    ("held", "named"),
    [
        ({"model": {"vocab": {"a": 0}}, "added_tokens": None}, "added_tokens"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [1]}, "added_tokens"),
        ({"model": {"vocab": {"a": "0"}}}, "id '0'"),
        ({"model": {"vocab": ["a"]}}, "model.vocab"),
        ({"added_tokens": []}, "model.vocab"),
        ([], "JSON object"),
    ],
)
def test_a_damaged_tokenizer_is_a_line_that_names_its_file(
    tmp_path: Path, held: Any, named: str
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match=named) as refused:
        names_of_tokens(tmp_path)
    assert "tokenizer.json" in str(refused.value)


def test_a_token_with_a_huge_id_costs_no_more_than_another(tmp_path: Path) -> None:
    token = {"id": 3_000_000_000, "content": "zz", "special": True}
    held = {"model": {"vocab": {"a": 0}}, "added_tokens": [token]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(held))
    names, specials = names_of_tokens(tmp_path)
    assert names == {0: "a", 3_000_000_000: "zz"}
    assert specials == {3_000_000_000: "zz"}


@pytest.mark.parametrize(
    "value", [{"temperature": "x"}, {"temperature": []}, {"top_k": 1e308}, {"min_p": -1}]
)
def test_a_default_that_no_request_could_use_is_refused_at_the_start(
    tmp_path: Path, value: dict[str, Any]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"generation_config\.json: " + next(iter(value))):
        generation_defaults(tmp_path)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--speculative-config", "{"], "speculative_config='{'"),
        (["--reasoning-config", "{"], "reasoning_config='{'"),
        *(
            pytest.param(flags.split(), named, marks=pytest.mark.slow)
            for flags, named in (
                ('--speculative-config {"method":"ngram"}', "num_speculative_tokens"),
                ('--reasoning-config {"reasoning_start_str":"<t>"}', "reasoning_end_str"),
                ("--scheduling-policy other", "policy='other'"),
                ("--dtype int8", "dtype="),
                ("--release 0.1.0", "release='0.1.0'"),
                ("--block-size 0", "block_size=0"),
                ("--tensor-parallel-size 2 --speculative-config {}", "speculative_config"),
            )
        ),
    ],
)
def test_a_flag_that_the_engine_refuses_is_a_line_with_its_words(
    flags: list[str], named: str
) -> None:
    ran = CliRunner().invoke(app, ["serve", "byte-llama", "--port", "0", *flags])
    assert ran.exit_code == 2
    assert named in ran.output


FLAGS = {
    "shutdown_timeout": 7, "h11_max_incomplete_event_size": 2048, "h11_max_header_count": 9,
    "enable_request_id_headers": True, "keep_alive_on_engine_death": True,
}  # fmt: skip


@pytest.mark.parametrize("given", [False, True])
def test_flags_and_a_variable_of_the_http_side_reach_the_server(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}

    def run(served: Any, *arguments: Any, **options: Any) -> None:
        found.update(options, enable_request_id_headers=arguments[-1])

    monkeypatch.setattr(launch, "serve_engine", lambda *_, **__: None)
    monkeypatch.setattr(launch, "run", run)
    flags: list[str] = []
    wanted = {
        "shutdown_timeout": 0, "h11_max_incomplete_event_size": 65536, "h11_max_header_count": 256,
        "enable_request_id_headers": False, "keep_alive_on_engine_death": False,
        "timeout_keep_alive": 5,
    }  # fmt: skip
    if given:
        wanted = FLAGS | {"timeout_keep_alive": 60}
        for name, value in FLAGS.items():
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "60")
    ran = CliRunner().invoke(app, ["serve", "--port", "0", *flags])
    assert (ran.exit_code, found) == (0, wanted)


@pytest.mark.parametrize("value", ["", "-1", "1.5", "x"])
def test_a_keep_alive_that_is_no_number_of_seconds_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", value)
    ran = CliRunner().invoke(app, ["serve", "no-such-model", "--port", "0"])
    assert ran.exit_code == 2
    assert f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE={value!r}" in ran.output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shutdown_timeout", -1), ("h11_max_incomplete_event_size", 0),
        ("h11_max_header_count", 0), ("timeout_keep_alive", -1),
    ],
)  # fmt: skip
def test_a_bound_of_the_server_that_is_none_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: need at least"):
        HTTPServer(None, None, **{name: value})  # type: ignore[arg-type]


def test_the_seconds_of_an_idle_connection_are_the_parsers() -> None:
    asking = AsyncLLM(make_engine())
    try:
        assert HTTPServer(None, asking, timeout_keep_alive=7).config.timeout_keep_alive == 7
    finally:
        asking.close()


# ---------------------------------------------------------------------- the end


ENDLESS = {"max_model_len": None, "num_blocks": 4000}


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_a_stream_that_outlasts_the_timeout_ends_as_aborted(timeout: float) -> None:
    with serving(make_engine(**ENDLESS), http={"shutdown_timeout": timeout}) as (port, _):
        answer = begin_stream(port, max_tokens=900)
    *_, last, done = events(answer.read().decode().lstrip("\n"))
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")


def test_a_server_that_ends_lets_streams_end_and_takes_no_new_request() -> None:
    engine, may_end, num_plans = make_engine(), threading.Event(), itertools.count()

    def hold(plan: Any) -> None:
        if next(num_plans):
            may_end.wait(DEADLINE_S)

    engine.observers.append(hold)
    ends: list[Callable[[], None]] = []
    options = {"shutdown_timeout": 30}
    with serving(engine, http=options, ends=ends) as (port, _), closing(half(port)) as late:
        answer = begin_stream(port, max_tokens=8)
        ends[0]()
        wait_until(lambda: not _is_open(port))
        late.sendall(b'"a"}')
        refused = http.client.HTTPResponse(late)
        refused.begin()
        said = json.loads(refused.read())["error"]
        may_end.set()
        *_, last, done = events(answer.read().decode().lstrip("\n"))
    assert (refused.status, said["type"]) == (500, "InternalServerError")
    assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")


def half(port: int) -> socket.socket:
    """A connection on which a request's body is still to end, with four bytes."""
    client = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    lines = f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json"
    body = b'{"prompt": '
    client.sendall("\r\n".join((*lines, f"Content-Length: {len(body) + 4}", "", "")).encode())
    client.sendall(body)
    return client


def test_what_comes_after_the_end_of_the_timeout_ends_as_aborted() -> None:
    asking = AsyncLLM(make_engine())

    async def late() -> list[Any]:
        await asking.shutdown(0)
        stream = await asking.open("a", SamplingParams(max_tokens=4), "late")
        return [delta async for delta in stream.deltas()]

    try:
        deltas = run_alone(late())
    finally:
        asking.close()
    said = [(delta.text, delta.token_ids, delta.finish_reason) for delta in deltas]
    assert said == [("", [], "abort")]


def test_a_server_whose_engine_died_says_so_once_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()

    def die(plan: Any) -> None:
        raise RuntimeError("the model is gone")

    engine.observers.append(die)
    with serving(engine) as (port, served):
        for stream in (False, True):
            try:
                status, body = ask(port, COMPLETIONS, {"prompt": "a", "stream": stream})
            except ConnectionError:
                assert stream  # it has ended already
                break
            assert (status, body["error"]["type"]) == (500, "InternalServerError")
        wait_until(lambda: served.engine.error)

        def said() -> list[str]:
            return [each.message for each in caplog.records if "model is gone" in each.message]

        wait_until(said)  # another thread says it
    assert said() == ["the engine has ended: RuntimeError: the model is gone"]


def test_a_server_told_to_stay_answers_with_errors_when_its_engine_died() -> None:
    engine = make_engine()

    def die(plan: Any) -> None:
        raise RuntimeError("the model is gone")

    engine.observers.append(die)
    with serving(engine, http={"keep_alive_on_engine_death": True}) as (port, _):
        for stream in (False, True, False):
            status, body = ask(port, COMPLETIONS, {"prompt": "a", "stream": stream})
            assert (status, body["error"]["type"]) == (500, "InternalServerError")
        assert ask(port, "/health")[0] == 503


@pytest.mark.slow
def test_an_engine_whose_process_is_killed_leaves_no_process() -> None:
    others = children()  # ranks that another test's engine has, in the same process
    asking = AsyncLLM(launch.make_engine, model="toy", lora_modules={}, knobs={"num_blocks": 8})
    said: list[EngineDead] = []
    asking.on_death = said.append
    new = [pid for pid in children() if pid not in others]
    (engine,) = (int(pid) for pid in new if "multiprocessing.spawn" in command_of(pid))
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{engine}").exists())
    assert [str(error) for error in said] == ["the engine has ended: its process is gone"]
    assert isinstance(asking.error, EngineDead)


def children() -> list[str]:
    """Ids of this process's children."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def command_of(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.slow
def test_a_signal_to_the_whole_group_lets_an_open_stream_end(usual_signals: None) -> None:
    command = [sys.executable, "-m", "mini_vllm.entrypoints.cli", "serve", "--port", "0"]
    command += ["--shutdown-timeout", "30"]
    server = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = next(int(at[1]) for line in server.stdout if (at := re.search(r":(\d+)/v1", line)))
        wait_until(lambda: _is_open(port))  # its address is said before the model is loaded
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        kind = {"Content-Type": "application/json"}
        connection.request("POST", COMPLETIONS, json.dumps(body), kind)
        answer = connection.getresponse()
        first = answer.readline()
        os.killpg(server.pid, signal.SIGTERM)
        *chunks, done = events((first + answer.read()).decode())
        server.communicate(timeout=30)
    finally:
        server.kill()
    assert (chunks[-1]["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    assert server.returncode == 0
