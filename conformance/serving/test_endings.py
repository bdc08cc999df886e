"""How our server ends beside vLLM's recorded one, its bounds beside theirs, and mutants caught."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mini_vllm.tests.server_support import serving  # first: it may skip

from conformance import recording  # isort: skip
from conformance.serve_stream import free_port, wait_for
from conformance.serving import endings
from conformance.serving.battery import KEY, MAX_MODEL_LEN, MODEL
from conformance.serving.recorded import ROOT, TEMPLATE
from conformance.serving.test_apis import mutated
from mini_vllm.engine import LLMEngine
from mini_vllm.entrypoints import async_llm, engine_core
from mini_vllm.entrypoints.openai import completion, http, messages, server
from mini_vllm.entrypoints.openai import serving as openai_serving
from mini_vllm.entrypoints.tests import test_server_life

pytestmark = pytest.mark.slow
Heard = dict[str, dict[str, Any]]
UNDER_WAY = {ask.name for ask in endings.clients()}
"""Clients whose answers are under way when the signal comes; the others come after it."""
ANSWERS = UNDER_WAY - {"beams"}
"""Those that wait for one request. A search asks anew each round, and hears an error."""


@contextmanager
def our_server(**options: Any) -> Iterator[tuple[int, Callable[[], None]]]:
    """Its port, and what asks it to end."""
    ends: list[Callable[[], None]] = []
    engine = LLMEngine(MODEL, max_model_len=MAX_MODEL_LEN, num_blocks=512)
    with serving(
        engine, keys=(KEY,), model=MODEL, chat_template=TEMPLATE.read_text(encoding="utf-8"),
        tool_call_parser="hermes", ends=ends, **options,
    ) as (port, _):  # fmt: skip
        yield port, ends[0]


def ours(timeout: float) -> Heard:
    """What clients of our server hear when it is asked to end, by their names."""
    with (
        our_server(http={"shutdown_timeout": timeout}) as (port, end),
        endings.heard(port, end, timeout + endings.SILENCE_S) as found,
    ):
        return {each.pop("client"): each for each in found}


def differing(ours: Heard, theirs: Heard) -> set[str]:
    """Clients that hear something else; those of ours that theirs does not know do not count."""
    return {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}


def as_the_core_says() -> Heard:
    """What ours must say when requests are aborted: of those under way what clients hear when the
    core gets the signal, of the others what they hear when the server does."""
    return endings.kept("at once") | endings.kept("at once, to the core")


# ---------------------------------------------------------------------- what was recorded


@pytest.mark.parametrize("situation", ["at once", "at once, again", "too late"])
def test_clients_of_the_real_server_hear_nothing_of_an_abort(situation: str) -> None:
    theirs = endings.kept(situation)
    assert {theirs[name]["end"] for name in ANSWERS} == {"silence"}
    assert theirs[""] == {"exit": 0, "after": "its clients have left"}


def test_the_core_of_the_real_server_tells_its_clients() -> None:
    theirs = endings.kept("at once, to the core")
    completions = [name for name in ANSWERS if "completions" in name]
    assert len(completions) == 4
    assert {theirs[name]["reason"] for name in completions} == {"abort"}
    assert {theirs[name]["end"] for name in UNDER_WAY} == {"whole"}


# ---------------------------------------------------------------------- ours beside it


def test_at_once_ours_says_what_the_real_core_says() -> None:
    assert differing(ours(0), as_the_core_says()) == set()


def test_too_late_ours_says_what_the_real_core_says() -> None:
    assert differing(ours(0.05), as_the_core_says()) == set()


def test_drained_ours_says_what_the_real_server_says() -> None:
    assert differing(ours(120), endings.kept("drained")) == DRAINED_OTHERWISE


DRAINED_OTHERWISE = {"beams"}
"""A search under way goes on here; there its next round is refused."""


ENDED_OTHERWISE = {
    "at once": "there clients must leave first",
    "too late": "there clients must leave first",
}
"""Situations in which the real server does not end by itself."""


@contextmanager
def our_process(timeout: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Our server as a program of its own: its port and its process."""
    port = free_port()
    command = [
        sys.executable, "-m", "mini_vllm.entrypoints.cli", "serve", f"models/{MODEL}",
        "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", MODEL,
        "--tool-call-parser", "hermes", "--api-key", KEY, "--shutdown-timeout", str(timeout),
        "--chat-template", str(TEMPLATE.relative_to(ROOT)),
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_for(process, f"http://127.0.0.1:{port}")
        yield port, process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "name", ["at once", "too late", "drained", "drained, then SIGINT", "drained, then SIGTERM"]
)
def test_our_process_ends_by_signals_as_theirs(name: str, usual_signals: None) -> None:
    (situation,) = (each for each in endings.SITUATIONS if each.name == name)
    second = situation.second
    with our_process(situation.timeout) as (port, process):
        again = None if second is None else lambda: process.send_signal(second)
        with endings.heard(port, process.terminate, endings.SILENCE_S, again) as found:
            heard = {each.pop("client"): each for each in found}
            status = process.wait(endings.WAIT_S)
    theirs = endings.kept(name)
    assert status == theirs[""]["exit"]
    assert (theirs[""]["after"] != "by itself") == (name in ENDED_OTHERWISE)
    if second is not None:
        ends = {client: each["end"] for client, each in heard.items()}
        assert ends == {client: theirs[client]["end"] for client in heard}


# ---------------------------------------------------------------------- headers


def taken_by(parser: str) -> dict[str, bool]:
    """Which requests with many headers the real server takes with a parser."""
    lines = [line for line in recording.lines(endings.KEPT) if line.get("parser") == parser]
    return {line["headers"]: line["taken"] for line in lines}


def test_the_real_server_bounds_no_headers_as_it_is_installed() -> None:
    assert set(taken_by("httptools").values()) == {True}
    assert [taken_by("h11")[name] for name in endings.MANY] == [True, True, False, False]


def test_ours_bounds_headers_as_theirs_with_h11_and_counts_them() -> None:
    with our_server() as (port, _):
        found = {name: endings.takes(port, sent) for name, sent in endings.MANY.items()}
    assert found == taken_by("h11") | {"257 headers": False}


def test_request_ids_are_answered_as_theirs() -> None:
    theirs = [line for line in recording.lines(endings.KEPT) if "id" in line]
    with our_server(enable_request_id_headers=True) as (port, _):
        assert list(endings.request_ids(port)) == theirs


# ---------------------------------------------------------------------- mutants


def mutant_of(where: Any, what: str, old: str, new: str) -> Any:
    """What `what` is in a module, or in a class, after the change.

    Raises:
        AssertionError: the text is not there.
    """
    if inspect.ismodule(where):
        return mutated(where, what, old, new)
    source = textwrap.dedent(inspect.getsource(getattr(where, what)))
    assert old in source, "the method has changed: mend the mutant"
    changed = source.replace(old, new).replace("super()", f"super({where.__name__}, self)")
    scope = dict(vars(sys.modules[where.__module__]))
    exec(compile("from __future__ import annotations\n" + changed, "mutant", "exec"), scope)
    return scope[what]


MUTANTS: dict[str, tuple[Any, str, str, str, float]] = {
    "requests have their time whatever the timeout": (
        async_llm.AsyncLLM, "shutdown", "sleep(timeout)", "sleep(60)", 0
    ),
    "the timeout is not waited for": (
        async_llm.AsyncLLM, "shutdown", "sleep(timeout)", "sleep(0)", 120
    ),
    "the engine is closed when the time is over": (
        async_llm.AsyncLLM, "shutdown", 'self._send("shutdown")', "self.close()", 0
    ),
    "what comes during the drain is answered": (
        server.Server, "_use_body", "if self.served.engine.shutting_down:", "if False:", 120
    ),
    "the aborted are not told": (
        engine_core.EngineCore, "_end_as_aborted", "self._stale = True", "pass", 0
    ),
    "only the first request is aborted": (
        engine_core.EngineCore, "_shut_down", "list(self._streams)", "list(self._streams)[:1]", 0
    ),
    "an aborted search fails at the token that it lacks": (
        openai_serving, "beams_of", 'if delta.finish_reason == "abort"', "if False", 0
    ),
    "an abort is the end of a turn": (
        messages, "STOP_REASONS", '"length": "max_tokens"', '"abort": "end_turn"', 0
    ),
    "connections are closed, whatever is under way": (
        http.HTTPServer, "shutdown", "await super().shutdown(sockets)",
        "self.force_exit = True; await uvicorn.Server.shutdown(self, sockets)", 120
    ),
}  # fmt: skip
"""What an end may get wrong: where, what is changed there, a text and another, and the timeout with
which it shows."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_ends_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, what, old, new, timeout = MUTANTS[name]
    changed = mutant_of(where, what, old, new)
    monkeypatch.setattr(where, what, changed)
    if hasattr(completion, what):  # imported there by its name
        monkeypatch.setattr(completion, what, changed)
    theirs = as_the_core_says() if timeout == 0 else endings.kept("drained")
    assert differing(ours(timeout), theirs) - (DRAINED_OTHERWISE if timeout else set()), name


def test_a_new_request_runs_on_in_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = mutant_of(
        engine_core.EngineCore, "_shut_down", "self._shutting_down = True", "pass"
    )  # fmt: skip
    monkeypatch.setattr(engine_core.EngineCore, "_shut_down", changed)
    with pytest.raises(AssertionError):
        test_server_life.test_what_comes_after_the_end_of_the_timeout_ends_as_aborted()


def test_a_mutant_counts_one_header_less(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = mutant_of(http._Connection, "next_event", "> self.max", ">= self.max")
    monkeypatch.setattr(http._Connection, "next_event", changed)
    with pytest.raises(AssertionError):
        test_ours_bounds_headers_as_theirs_with_h11_and_counts_them()


def test_a_mutant_makes_up_every_id(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = mutant_of(server.WithRequestId, "__call__", '"x-request-id", uuid', '"", uuid')
    monkeypatch.setattr(server.WithRequestId, "__call__", changed)
    with pytest.raises(AssertionError):
        test_request_ids_are_answered_as_theirs()
