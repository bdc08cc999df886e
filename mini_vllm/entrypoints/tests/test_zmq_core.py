"""The engine core that a front end reaches through sockets: greeting, requests, calls, ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine

zmq = pytest.importorskip("zmq", reason="needs the extra core")
msgspec = pytest.importorskip("msgspec", reason="needs the extra core")

from mini_vllm.entrypoints import wire  # noqa: E402
from mini_vllm.entrypoints.zmq_core import FrontEndGone, ZmqCore  # noqa: E402

PROMPT = list(b"The KV cache is divided into blocks")
WAIT_MS = 30_000


def engine(**knobs: Any) -> LLMEngine:
    return LLMEngine("byte-llama", num_blocks=64, max_num_seqs=4, dtype="float64", **knobs)


class FrontEnd:
    """The other side: greets as vLLM's does, asks, listens."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.sockets = {
            name: self.context.socket(kind)
            for name, kind in (("shake", zmq.ROUTER), ("ask", zmq.ROUTER), ("hear", zmq.PULL))
        }
        for socket in self.sockets.values():
            socket.setsockopt(zmq.LINGER, 0)
        self.ports = {
            name: socket.bind_to_random_port("tcp://127.0.0.1")
            for name, socket in self.sockets.items()
        }
        self.ready: dict[str, Any] = {}
        self.error: BaseException | None = None

    def address(self, name: str) -> str:
        return f"tcp://127.0.0.1:{self.ports[name]}"

    def hello(self, made: LLMEngine, timeout: float = 30.0) -> threading.Thread:
        """Run the engine's side on a thread; it says hello."""

        def run() -> None:
            try:
                ZmqCore(made, self.address("shake"), timeout=timeout).run()
            except BaseException as error:
                self.error = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def begin(self, made: LLMEngine, **more: Any) -> threading.Thread:
        """Run the engine's side on a thread and greet it."""
        thread = self.hello(made)
        shake = self.sockets["shake"]
        name, hello = self.receive("shake")
        assert msgspec.msgpack.decode(hello)["status"] == "HELLO"
        addresses = {"inputs": [self.address("ask")], "outputs": [self.address("hear")], **more}
        shake.send_multipart(
            [name, msgspec.msgpack.encode({"addresses": addresses, "parallel_config": {}})]
        )
        if not more:
            _, payload = self.receive("ask")
            self.ready = msgspec.msgpack.decode(payload)
            assert msgspec.msgpack.decode(self.receive("shake")[1])["status"] == "READY"
        return thread

    def receive(self, name: str) -> list[bytes]:
        assert self.sockets[name].poll(WAIT_MS), f"nothing came on {name}"
        frames: list[bytes] = self.sockets[name].recv_multipart()
        return frames

    def send(self, kind: bytes, value: Any) -> None:
        self.sockets["ask"].send_multipart(
            [(0).to_bytes(2, "little"), kind, msgspec.msgpack.encode(value)]
        )

    def add(self, request_id: str, prompt: Any = PROMPT, **fields: Any) -> None:
        params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        record = dict.fromkeys(wire.REQUEST) | {
            "request_id": request_id, "prompt_token_ids": prompt, "arrival_time": 1.0,
            "sampling_params": params | fields.pop("params", {}),
        } | fields  # fmt: skip
        self.send(wire.ADD, list(record.values()))

    def hear(self) -> list[Any]:
        """The next message: engine, news, numbers, time and perhaps an answer."""
        message: list[Any] = msgspec.msgpack.decode(self.receive("hear")[0])
        return message

    def news(self, request_id: str) -> list[list[Any]]:
        """Everything about one request until it ends."""
        found = []
        while not found or found[-1][5] is None:
            found += [each for each in self.hear()[1] if each[0] == request_id]
        return found

    def close(self) -> None:
        self.context.destroy(0)


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    made = FrontEnd()
    yield made
    made.close()


def tokens(news: list[list[Any]]) -> list[int]:
    return [token for each in news for token in each[1]]


def test_a_core_says_how_long_a_request_may_be_and_how_many_blocks_it_has(front):
    front.begin(engine(max_model_len=96))
    assert front.ready["max_model_len"] == 96
    assert front.ready["num_gpu_blocks"] == 64


def test_a_request_is_answered_with_the_tokens_that_the_engine_gives_alone(front):
    wanted = engine().generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    front.begin(engine())
    front.add("a")
    news = front.news("a")
    assert tokens(news) == wanted.outputs[0].token_ids
    assert wire.REASONS[news[-1][5]] == "length"


def test_the_first_news_of_a_request_says_what_of_its_prompt_was_cached(front):
    front.begin(engine())
    front.add("a")
    first = front.news("a")[0]
    front.add("b")
    second = front.news("b")[0]
    assert first[10]["num_cached_tokens"] == 0
    assert second[10]["num_cached_tokens"] == 32
    assert second[10]["num_computed_tokens"] == len(PROMPT) - 32
    assert [event["type"] for event in second[7]] == [wire.QUEUED, wire.SCHEDULED]


def test_log_probabilities_arrive_as_arrays_by_the_token_and_of_the_prompt_at_once(front):
    front.begin(engine())
    front.add("a", params={"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 3})
    news = front.news("a")
    kind, shape, _ = news[0][2][1]
    assert (kind, shape) == ("<f4", [1, 3])
    kind, shape, _ = news[0][3][1]
    assert (kind, shape) == ("float32", [len(PROMPT) - 1, 2])
    assert all(each[3] is None for each in news[1:])


def test_an_aborted_request_says_no_more_and_frees_its_blocks(front):
    made = engine()
    front.begin(made)
    front.add("a", params={"max_tokens": 400})
    front.hear()
    front.send(wire.ABORT, ["a"])
    front.add("b", params={"max_tokens": 2})
    front.news("b")
    assert not made.has_unfinished_requests()
    assert made.scheduler.kv.block_pool.get_num_free_blocks() == 63


@pytest.mark.parametrize(
    "wrong",
    [
        {"params": {"thinking_token_budget": 3}},
        {"params": {"max_tokens": None}},
        {"params": {"temperature": -1.0}},
        {"mm_features": [1]},
        {"lora_request": ["code", 1, "models/adapters/code"]},
        {"prompt": [999]},
        {"prompt": None},
    ],
)
def test_a_request_that_cannot_be_served_ends_alone_with_an_error(front, wrong):
    front.begin(engine())
    front.add("a", **wrong)
    (news,) = front.news("a")
    assert (news[1], wire.REASONS[news[5]]) == ([], "error")
    front.add("b", params={"max_tokens": 2})
    assert len(tokens(front.news("b"))) == 2


@pytest.mark.parametrize(
    "params",
    [
        {"seed": -5, "temperature": 1.0},
        {"temperature": float("nan")},
        {"extra_args": {"kv_transfer_params": {"a": 1}}},
    ],
)
def test_what_the_real_core_serves_is_served(front, params):
    front.begin(engine())
    front.add("a", params={"max_tokens": 2, **params})
    assert len(tokens(front.news("a"))) == 2


def test_a_step_tells_how_many_run_and_wait_and_what_was_looked_up(front):
    front.begin(engine())
    front.add("a", params={"max_tokens": 1})
    message = front.hear()
    numbers = message[2]
    assert (numbers["num_running_reqs"], numbers["num_waiting_reqs"]) == (0, 0)
    assert numbers["prefix_cache_stats"]["queries"] == len(PROMPT)


def test_a_call_is_answered_and_one_that_is_not_there_is_refused_by_name(front):
    front.begin(engine())
    front.send(wire.UTILITY, [0, 7, "get_supported_tasks", []])
    assert front.hear()[4] == [7, None, [None, ["generate"]]]
    front.send(wire.UTILITY, [0, 8, "start_profile", []])
    number, failure, _ = front.hear()[4]
    assert number == 8
    assert "start_profile" in failure


def test_a_core_ends_when_its_front_end_has_gone(front):
    thread = front.begin(engine())
    front.close()
    thread.join(120)
    assert not thread.is_alive()
    assert isinstance(front.error, FrontEndGone)


def test_a_core_whose_front_end_goes_before_every_socket_has_come_ends_at_once(front):
    """A connection that never comes hides no other one that breaks."""
    front.sockets["hear"].close(0)
    thread = front.hello(engine(), timeout=600.0)
    name, _ = front.receive("shake")
    addresses = {"inputs": [front.address("ask")], "outputs": [front.address("hear")]}
    answer = msgspec.msgpack.encode({"addresses": addresses, "parallel_config": {}})
    front.sockets["shake"].send_multipart([name, answer])
    front.receive("ask")
    front.receive("shake")
    front.close()
    thread.join(120)
    assert not thread.is_alive()
    assert isinstance(front.error, FrontEndGone)


def test_an_engine_that_fails_says_so_before_it_ends(front):
    made = engine()

    def fail() -> None:
        raise RuntimeError("no more")

    made.step = fail  # type: ignore[method-assign, assignment]
    thread = front.begin(made)
    front.add("a")
    assert front.receive("hear") == [wire.DEAD]
    thread.join(20)
    assert isinstance(front.error, RuntimeError)


def test_a_front_end_that_coordinates_several_engines_is_refused(front):
    thread = front.begin(engine(), coordinator_input="tcp://127.0.0.1:1")
    thread.join(20)
    assert "data-parallel-size 1" in str(front.error)


def test_an_address_that_is_none_is_refused_by_its_value():
    with pytest.raises(ValueError, match="address='nowhere'"):
        ZmqCore(engine(), "nowhere")


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (b"\xc1", "not msgpack"),
        (b"", "not msgpack"),
        (None, "need a map with addresses"),
        ({1: 2}, "need a map with addresses"),
        ({"addresses": {"inputs": 1, "outputs": []}}, "need lists of texts"),
        ({"addresses": {"inputs": [], "outputs": []}}, "at least one"),
        ({"addresses": {"inputs": ["nope"], "outputs": ["nope"]}}, "inputs='nope'"),
    ],
)
def test_an_answer_to_the_hello_that_is_none_is_refused_in_a_line(front, answer, named):
    thread = front.hello(engine())
    name, _ = front.receive("shake")
    sent = answer if isinstance(answer, bytes) else msgspec.msgpack.encode(answer)
    front.sockets["shake"].send_multipart([name, sent])
    thread.join(20)
    assert isinstance(front.error, ValueError)
    assert named in str(front.error)


def test_a_front_end_that_leaves_before_it_answers_is_not_waited_for(front):
    thread = front.hello(engine())
    front.receive("shake")
    front.close()
    thread.join(20)
    assert "left before it answered" in str(front.error)


@pytest.mark.slow  # its five seconds leave a late thread time to answer
def test_a_front_end_that_dies_after_its_answer_is_not_waited_for(front):
    thread = front.hello(engine(), timeout=5.0)
    name, _ = front.receive("shake")
    addresses = {"inputs": [front.address("ask")], "outputs": [front.address("hear")]}
    for each in ("ask", "hear"):  # it has died: where it said it would listen, nothing does
        front.sockets[each].close(0)
    answer = {"addresses": addresses, "parallel_config": {}}
    front.sockets["shake"].send_multipart([name, msgspec.msgpack.encode(answer)])
    thread.join(20)
    assert "left after its answer" in str(front.error)


def test_nobody_at_the_address_is_said_after_the_time_is_up():
    with pytest.raises(FrontEndGone, match=r"for 0\.1 s"):
        ZmqCore(engine(), "tcp://127.0.0.1:9", timeout=0.1)


def test_a_message_that_is_no_record_is_refused():
    with pytest.raises(ValueError, match="at most 20 fields"):
        wire.request(msgspec.msgpack.encode({"request_id": "a"}))
    with pytest.raises(ValueError, match="not msgpack"):
        wire.request(b"\xc1")
