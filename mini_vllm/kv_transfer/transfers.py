"""The two ends of a transfer: what a producer offers, and what a consumer has of it so far.

Promises: an `Outbox` reads a block only while its request is offered, so never after it was given
up, and of a prompt that is being computed no token before its layer has it; an `Inbox` writes a
block only while its load is under way, so never after it was reported. Both work on messages,
whatever carries them, and on a clock that is an argument.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mini_vllm.kv_transfer.base import KVConnectorOutput
from mini_vllm.kv_transfer.wire import (
    Fingerprint,
    Kind,
    Message,
    WireError,
    layer_messages,
    layer_of,
)

Caches = Sequence[np.ndarray]
"""Per layer [2, num_blocks, block_size, num_kv_heads, head_dim]."""


@dataclass(slots=True)
class Offer:
    """Blocks of a request that has ended, kept for a peer; or that is still being computed."""

    request_id: str
    block_ids: Sequence[int]
    num_tokens: int
    prompt_hash: str
    """Of the tokens whose K and V they are."""
    expires: float
    ready: list[int] | None = None
    """Tokens that are computed, per layer; None: all."""
    is_read: bool = False
    """A peer has all of it, though the request has not ended yet."""

    def num_ready(self, layer: int) -> int:
        """Tokens of a layer that may be read."""
        return self.num_tokens if self.ready is None else self.ready[layer]


class Outbox:
    """What a producer offers, by request. Its methods may be called from any thread."""

    def __init__(self, fingerprint: Fingerprint, lease: float, clock: Callable[[], float]) -> None:
        """Args: `lease` is how long, on `clock`, an offer stands that no peer has finished."""
        self.fingerprint, self.lease, self.clock = fingerprint, lease, clock
        self.caches: Caches = ()
        self._offers: dict[str, Offer] = {}
        self._growing: dict[str, int] = {}
        self._ended: list[str] = []
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ while it is computed

    def expect(self, request_id: str, num_tokens: int, prompt_hash: str) -> None:
        """Peers may ask for a prompt that waits to be computed; they get each layer when it is
        there. It has no lease until it is offered."""
        ready = [0] * self.fingerprint.num_layers
        with self._lock:
            self._offers[request_id] = Offer(
                request_id, (), num_tokens, prompt_hash, math.inf, ready
            )

    def grow(self, chunks: Iterable[tuple[str, Sequence[int], int]]) -> None:
        """A step begins: it computes these expected prompts (id, blocks, end of the chunk).

        What stands before the chunk may be a hit that another request computes in this step.
        """
        with self._lock:
            self._growing = {}
            for request_id, block_ids, end in chunks:
                if (offer := self._offers.get(request_id)) is not None:
                    offer.block_ids = block_ids
                    self._growing[request_id] = end

    def computed(self, layer: int) -> None:
        """The step has written this layer's K and V."""
        with self._lock:
            for request_id, end in self._growing.items():
                offer = self._offers.get(request_id)
                if offer is not None and offer.ready is not None:
                    offer.ready[layer] = end

    def pause(self, request_id: str) -> None:
        """An expected prompt has lost its blocks; it will be computed again."""
        with self._lock:
            if (offer := self._offers.get(request_id)) is not None:
                offer.ready = [0] * self.fingerprint.num_layers

    def drop(self, request_id: str) -> None:
        """An expected prompt has ended otherwise: there is nothing to read, and nothing kept."""
        with self._lock:
            self._offers.pop(request_id, None)

    # ------------------------------------------------------------------ when it has ended

    def offer(
        self, request_id: str, block_ids: Sequence[int], num_tokens: int, prompt_hash: str
    ) -> None:
        """Peers may read these blocks from now on."""
        expires = self.clock() + self.lease
        with self._lock:
            before = self._offers.pop(request_id, None)
            if before is not None and before.is_read:
                self._ended.append(request_id)
                return
            self._offers[request_id] = Offer(
                request_id, block_ids, num_tokens, prompt_hash, expires
            )

    def answer(self, message: Message) -> Iterator[Message | None]:
        """What a READ or a DONE is answered with; None: the next layer is not computed yet.

        Each layer is copied while the offer stands; if it is given up meanwhile, the rest is a
        GONE.
        """
        request_id = str(message.fields.get("request_id"))
        if message.kind == Kind.DONE:
            self._end(request_id)
            return
        if message.kind != Kind.READ:
            raise WireError(f"the peer sent {message.kind.name}: need READ or DONE")
        sent, missing = [0] * self.fingerprint.num_layers, True
        while missing:
            missing, is_news = False, False
            for layer, count in enumerate(sent):
                with self._lock:
                    found = self._read(request_id, message.fields, count, layer)
                if isinstance(found, str):
                    yield Message(Kind.GONE, {"request_id": request_id, "why": found})
                    return
                kv, is_last = found
                missing |= not is_last
                if kv is not None:
                    yield from layer_messages(request_id, layer, kv, begin=count)
                    sent[layer], is_news = count + kv.shape[1], True
            if missing and not is_news:
                yield None
        yield Message(Kind.END, {"request_id": request_id})

    def _read(
        self, request_id: str, asked: Mapping[str, Any], sent: int, layer: int
    ) -> tuple[np.ndarray | None, bool] | str:
        """K and V of one layer behind those that were `sent`, a copy, and whether that is all of
        them; or why there are none."""
        offer = self._offers.get(request_id)
        if offer is None:
            return f"no K and V of {request_id!r}: never here, or given up"
        if asked.get("prompt_hash") != offer.prompt_hash:
            return f"the K and V of {request_id!r} are of another prompt"
        first, end = asked.get("first"), offer.num_ready(layer)
        if type(first) is not int or not 0 <= first < offer.num_tokens:
            return f"first={first!r}: there are {offer.num_tokens} tokens"
        begin, is_last = first + sent, end == offer.num_tokens
        if begin >= end:
            return None, begin == offer.num_tokens
        return gathered(self.caches[layer], offer.block_ids, begin, end), is_last

    def _end(self, request_id: str) -> None:
        with self._lock:
            offer = self._offers.get(request_id)
            if offer is None:
                return
            if offer.ready is not None:
                offer.is_read = True
                return
            del self._offers[request_id]
            self._ended.append(request_id)

    def take_ended(self) -> list[str]:
        """Requests whose blocks are not needed any more, since the last call."""
        now = self.clock()
        with self._lock:
            for request_id in [r for r, offer in self._offers.items() if offer.expires <= now]:
                del self._offers[request_id]
                self._ended.append(request_id)
            ended, self._ended = self._ended, []
        return ended

    def reset(self) -> None:
        """The cache is another: nothing is offered."""
        with self._lock:
            self._offers, self._growing, self._ended = {}, {}, []

    def __len__(self) -> int:
        return len(self._offers)


@dataclass(slots=True)
class Load:
    """What a consumer asks for, and where it goes."""

    request_id: str
    block_ids: Sequence[int]
    """The whole table."""
    first: int
    """The first token that comes from outside."""
    num_tokens: int
    """Up to where, from the start of the prompt."""
    remote: Mapping[str, Any]
    """Where from: the `kv_transfer_params` that the request brought."""
    deadline: float = 0.0
    num_received: list[int] = field(default_factory=list)
    """Per layer."""


class Inbox:
    """Loads under way. Used by the engine's thread alone."""

    def __init__(
        self, fingerprint: Fingerprint, timeout: float, clock: Callable[[], float]
    ) -> None:
        """Args: `timeout` is how long, on `clock`, a load may take."""
        self.fingerprint, self.timeout, self.clock = fingerprint, timeout, clock
        self.caches: Caches = ()
        self.loads: dict[int, Load] = {}
        """By number: a request may be loaded again, and what comes late is of an older number."""
        self._serial = 0
        self._received: list[str] = []
        self._invalid: set[int] = set()
        self._errors: dict[str, str] = {}

    def begin(self, load: Load) -> int:
        """The number of a load; its messages are taken until it ends."""
        self._serial += 1
        load.deadline = self.clock() + self.timeout
        load.num_received = [0] * self.fingerprint.num_layers
        self.loads[self._serial] = load
        return self._serial

    def take(self, number: int, message: Message | Exception) -> bool:
        """One message of a load, or what went wrong instead; whether the load goes on."""
        load = self.loads.get(number)
        if load is None:
            return False  # it has ended: not a byte of it is written
        try:
            if isinstance(message, Exception):
                raise message
            return self._take(number, load, message)
        except (WireError, OSError) as error:
            self.fail(number, f"{type(error).__name__}: {error}")
            return False

    def _take(self, number: int, load: Load, message: Message) -> bool:
        wanted = load.num_tokens - load.first
        if message.kind == Kind.GONE:
            raise WireError(str(message.fields.get("why")))
        if message.fields.get("request_id") != load.remote["remote_request_id"]:
            raise WireError(
                f"the peer sent request_id={message.fields.get('request_id')!r}: need "
                f"{load.remote['remote_request_id']!r}, which was asked for"
            )
        if message.kind == Kind.LAYER:
            index = message.fields.get("layer")
            known = type(index) is int and 0 <= index < len(load.num_received)
            received = load.num_received[index] if known else 0  # type: ignore[index]
            layer, kv = layer_of(message, self.fingerprint, received, wanted)
            scatter(self.caches[layer], load.block_ids, load.first + received, kv)
            load.num_received[layer] = received + kv.shape[1]
            return True
        if message.kind != Kind.END:
            raise WireError(f"the peer sent {message.kind.name}: need LAYER, END or GONE")
        for layer, count in enumerate(load.num_received):
            if count != wanted:
                raise WireError(f"layer {layer}: the peer sent {count} tokens, need {wanted}")
        del self.loads[number]
        self._received.append(load.request_id)
        return False

    def fail(self, number: int, why: str) -> None:
        """A load ends without its K and V: its blocks hold nothing."""
        load = self.loads.pop(number)
        size = self.caches[0].shape[2]
        self._invalid.update(load.block_ids[load.first // size : -(-load.num_tokens // size)])
        self._received.append(load.request_id)
        self._errors[load.request_id] = f"its KV could not be loaded: {why}"

    def take_ended(self) -> KVConnectorOutput:
        """The loads that have ended since the last call, and those that took too long."""
        now = self.clock()
        for number in [n for n, load in self.loads.items() if load.deadline <= now]:
            self.fail(number, f"no answer within {self.timeout:g}")
        output = KVConnectorOutput(
            self._received, invalid_block_ids=self._invalid, errors=self._errors
        )
        self._received, self._invalid, self._errors = [], set(), {}
        return output

    def reset(self) -> None:
        """The block tables are others: nothing that comes is written."""
        self.loads, self._received, self._invalid, self._errors = {}, [], set(), {}


def gathered(cache: np.ndarray, block_ids: Sequence[int], first: int, end: int) -> np.ndarray:
    """K and V [2, end - first, num_kv_heads, head_dim] of some tokens of one layer, a copy."""
    block, offset = np.divmod(np.arange(first, end), cache.shape[2])
    return cache[:, np.asarray(block_ids, dtype=np.int64)[block], offset]


def scatter(cache: np.ndarray, block_ids: Sequence[int], first: int, kv: np.ndarray) -> None:
    """Write K and V of tokens from `first` on into one layer."""
    block, offset = np.divmod(np.arange(first, first + kv.shape[1]), cache.shape[2])
    cache[:, np.asarray(block_ids, dtype=np.int64)[block], offset] = kv
