"""Lab 16-04: readers who are late, and clients who are gone.

An engine makes tokens at its own pace and clients read at theirs. Between them stands, for each
request, a collector. What holds:

- C1: nothing is lost and nothing comes twice: what a reader gets, joined, is what the engine made.
- C2: a reader who is late gets everything in one piece, and nobody waits for it.
- C3: a collector keeps one delta for each completion, however late its reader is.
- C4: a client that leaves gives back its blocks at once, and disturbs nobody.
- C5: an engine that fails says so to everybody who waits.

Sources: `vllm/v1/engine/output_processor.py:45` `RequestOutputCollector`,
`vllm/v1/engine/async_llm.py:591` `AsyncLLM.generate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.request import Request


@dataclass(slots=True)
class Delta:
    """What a completion has said since (given); `finish_reason` is None until its last one."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None


class Collector:
    """Deltas on their way to one reader.

    A trace: put [Delta(0, [1])], put [Delta(1, [7]), Delta(0, [2], "length")]; then `get_nowait`
    gives [Delta(0, [1, 2], "length"), Delta(1, [7])], and None after that.
    """

    def __init__(self) -> None:
        raise NotImplementedError

    def put(self, deltas: list[Delta]) -> None:
        """Add what a step made; never waits.

        A completion that has something waiting gets it at its end, with the newest finish reason;
        others stand behind, in the order in which they came. Work is that of the new tokens alone.
        While an error waits, what is put is dropped. The deltas belong to the collector.
        """
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """The next read raises `error`, once, instead of what waits."""
        raise NotImplementedError

    def get_nowait(self) -> list[Delta] | None:
        """Everything that waits, or None; then nothing waits.

        Raises:
            Exception: the error of `fail`.
        """
        raise NotImplementedError

    async def get(self) -> list[Delta]:
        """As `get_nowait`, when there is something."""
        raise NotImplementedError


class FrontDoor:
    """An engine and the clients that wait for it; one completion for each request.

    Nobody else steps the engine. `num_open` counts requests that have neither ended nor been left.
    """

    def __init__(self, engine: LLMEngine) -> None:
        raise NotImplementedError

    @property
    def num_open(self) -> int:
        raise NotImplementedError

    def open(self, request_id: str, prompt: list[int], params: SamplingParams) -> Collector:
        """Queue a request; its deltas come through the collector.

        Raises:
            ValueError: more than one completion, or the engine refuses it; then nothing is open.
        """
        raise NotImplementedError

    def step(self) -> None:
        """One step of the engine; every open request that has new tokens or has ended is told.

        Raises:
            Exception: the engine's, which every open request is told; then none is open.
        """
        raise NotImplementedError

    def leave(self, request_id: str) -> None:
        """The client is gone: the request ends now and its blocks are free.

        Of a request that is unknown, over or left, nothing is done.
        """
        raise NotImplementedError

    async def stream(
        self, request_id: str, prompt: list[int], params: SamplingParams
    ) -> AsyncIterator[Delta]:
        """The deltas of one request until it ends; somebody else calls `step`.

        However its reader stops, cancelled, closed or with an error, the request is left.
        """
        raise NotImplementedError
