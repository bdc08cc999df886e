"""A network in one process, in steps instead of seconds, that delays, reorders and damages.

Promises: what a seed does once it does again; every message goes through the bytes of `wire`, so a
damaged one is refused by the same check as on a socket. Used by tests, labs and figures.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mini_vllm.kv_transfer.transfers import Load, Outbox
from mini_vllm.kv_transfer.wire import (
    HEADER_BYTES,
    Kind,
    Message,
    WireError,
    decode,
    encode,
)

FAULTS = (
    "corrupt", "truncate", "silence", "reset", "refuse", "version", "flood", "early_end",
    "repeat", "another_prompt",
)  # fmt: skip
"""What may go wrong in one conversation: a bit flips, a message is cut short, nothing more comes,
the connection breaks, no peer listens, a peer of another version or one that sends too much, the
end comes before the layers, a layer comes twice, what comes is of another prompt. Besides, a
quarter as often, the notice that frees the blocks is lost."""


@dataclass(slots=True)
class _Conversation:
    """One READ on its way."""

    endpoint: SimulatedTransport
    number: int
    producer: tuple[str, int]
    answers: Iterator[Message | None]
    starts: int
    fault: str
    kept: list[Message] = field(default_factory=list)
    """Messages that others overtake."""
    is_over: bool = False
    """The producer has nothing more to say."""


class SimulatedNetwork:
    """Endpoints, what is between them, and a clock that `tick` moves."""

    def __init__(
        self, seed: int = 0, slowest: int = 0, fault_rate: float = 0.0, per_tick: int = 1_000
    ) -> None:
        """An idle one.

        Args:
            seed: of everything that is drawn.
            slowest: most steps before a conversation begins to deliver.
            fault_rate: share of the conversations in which one of `FAULTS` happens.
            per_tick: most messages that one conversation delivers in a step.
        """
        self.rng = random.Random(seed)
        self.slowest, self.fault_rate, self.per_tick = slowest, fault_rate, per_tick
        self.now = 0
        self.dead: set[tuple[str, int]] = set()
        """Endpoints whose process is gone."""
        self.happened: dict[str, int] = {}
        """How often each fault did."""
        self._endpoints: dict[tuple[str, int], SimulatedTransport] = {}
        self._conversations: list[_Conversation] = []
        self._notices: list[tuple[int, tuple[str, int], Message]] = []

    def connect(self, outbox: Outbox, extra: Mapping[str, Any]) -> SimulatedTransport:
        """An endpoint; what `PullConnector` takes as its transport."""
        endpoint = SimulatedTransport(self, outbox, ("simulated", len(self._endpoints) + 1))
        self._endpoints[endpoint.place] = endpoint
        return endpoint

    def clock(self) -> float:
        """Steps so far."""
        return float(self.now)

    def tick(self) -> None:
        """A step passes: deliver what it brings."""
        self.now += 1
        self.deliver()
        arrived = [notice for notice in self._notices if notice[0] <= self.now]
        self._notices = [notice for notice in self._notices if notice[0] > self.now]
        for _, place, message in arrived:
            if place not in self.dead:
                for _answer in self._endpoints[place].outbox.answer(message):
                    pass

    def deliver(self) -> None:
        """What conversations under way bring now, in the middle of a step or at its end."""
        for conversation in [*self._conversations]:
            if conversation.starts <= self.now and not self._deliver(conversation):
                self._conversations.remove(conversation)

    # ------------------------------------------------------------------ inside

    def _begin(self, endpoint: SimulatedTransport, number: int, load: Load) -> None:
        place = load.remote["remote_host"], load.remote["remote_port"]
        fault = ""
        if self.rng.random() < self.fault_rate:
            fault = self.rng.choice(FAULTS)
            self.happened[fault] = self.happened.get(fault, 0) + 1
        prompt_hash = "" if fault == "another_prompt" else load.remote["prompt_hash"]
        read = Message(Kind.READ, {
            "request_id": load.remote["remote_request_id"], "first": load.first,
            "prompt_hash": prompt_hash,
        })  # fmt: skip
        known = place in self._endpoints
        answers = self._endpoints[place].outbox.answer(read) if known else iter(())
        starts = self.now + self.rng.randint(0, self.slowest)
        self._conversations.append(_Conversation(endpoint, number, place, answers, starts, fault))

    def _deliver(self, talk: _Conversation) -> bool:
        """What one conversation brings in this step; whether it goes on."""
        give = talk.endpoint.news.append
        if talk.producer in self.dead or talk.fault in ("refuse", "reset"):
            error = ConnectionRefusedError if talk.fault == "refuse" else ConnectionResetError
            give((talk.number, error("the producer is gone")))
            return False
        if talk.fault == "silence":
            return False
        for _ in range(self.rng.randint(1, self.per_tick)):
            message = self._next(talk)
            if message is None and not talk.is_over:
                return True  # the rest is not computed yet
            if message is None:
                give((talk.number, WireError("the stream ended before a message")))
                return False
            news = self._carried(message, talk)
            give((talk.number, news))
            if isinstance(news, Exception) or news.kind != Kind.LAYER:
                return False
        return True

    def _next(self, talk: _Conversation) -> Message | None:
        """The next message; layers may come in any order, the parts of one and the end may not."""
        while len(talk.kept) < 3 and not talk.is_over:
            try:
                message = next(talk.answers)
            except StopIteration:
                talk.is_over = True
                break
            if message is None:
                break
            talk.kept.append(message)
            if message.kind != Kind.LAYER:
                break
        if not talk.kept:
            return None
        layers = [m.fields["layer"] for m in talk.kept if m.kind == Kind.LAYER]
        ahead = [i for i, layer in enumerate(layers) if layer not in layers[:i]] or [0]
        return talk.kept.pop(self.rng.choice(ahead))

    def _carried(self, message: Message, talk: _Conversation) -> Message | Exception:
        """A message through its bytes, and through what happens to them."""
        data = bytearray(encode(message))
        fault, talk.fault = talk.fault, ""
        if fault == "corrupt":
            data[self.rng.randrange(HEADER_BYTES, len(data))] ^= 1 << self.rng.randrange(8)
        elif fault == "truncate":
            del data[self.rng.randrange(len(data)) :]
        elif fault == "version":
            data[5] ^= 1
        elif fault == "flood":
            data[8:12] = b"\xff" * 4
        elif fault == "early_end":
            data = bytearray(
                encode(Message(Kind.END, {"request_id": message.fields["request_id"]}))
            )
        elif fault == "repeat" and message.kind == Kind.LAYER:
            talk.kept.append(message)
        try:
            return decode(bytes(data[:HEADER_BYTES]), bytes(data[HEADER_BYTES:]))
        except WireError as error:
            return error

    def _notify(self, remote: Mapping[str, Any]) -> None:
        place = remote["remote_host"], remote["remote_port"]
        if place not in self._endpoints:
            return
        if self.rng.random() < self.fault_rate / 4:
            self.happened["lose_done"] = self.happened.get("lose_done", 0) + 1
            return
        due = self.now + self.rng.randint(0, self.slowest)
        done = Message(Kind.DONE, {"request_id": remote["remote_request_id"]})
        self._notices.append((due, place, done))


class SimulatedTransport:
    """One engine's place in the network."""

    def __init__(self, network: SimulatedNetwork, outbox: Outbox, place: tuple[str, int]) -> None:
        self.network, self.outbox, self.place = network, outbox, place
        self.news: list[tuple[int, Message | Exception]] = []

    def address(self) -> Mapping[str, Any]:
        return {"remote_host": self.place[0], "remote_port": self.place[1]}

    def read(self, number: int, load: Load) -> None:
        self.network._begin(self, number, load)

    def done(self, remote: Mapping[str, Any], number: int | None = None) -> None:
        self.network._notify(remote)

    def poll(self) -> Iterable[tuple[int, Message | Exception]]:
        news, self.news = self.news, []
        return news

    def wait(self, seconds: float) -> None:
        """Steps pass, not seconds."""

    def forget(self) -> None:
        self.news = []

    def close(self) -> None:
        self.network.dead.add(self.place)
