"""Several whole engines, each a process, behind one balancer.

Promises: a request's text is that of one engine alone, whichever rank answers; a rank that dies
ends the others and is named. Mirrors `vllm/v1/engine/core_client.py:1349` `DPLBAsyncMPClient`, and
`vllm/v1/engine/core.py:1806` `DPEngineCoreProc._maybe_publish_request_counts` for what engines
tell. At the pin only engines with experts tell it: for dense models the balancer there sees its own
choices alone and counts requests for ever (mended later, pull request 49204). Here all tell.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_vllm.checks import whole
from mini_vllm.config import SamplingParams
from mini_vllm.distributed.balancer import Coordinator, LoadBalancer
from mini_vllm.distributed.pool import without_main
from mini_vllm.input_processor import one_each, per_prompt
from mini_vllm.observe.stats import StepStats
from mini_vllm.outputs import RequestOutput
from mini_vllm.request import Request

if TYPE_CHECKING:
    from mini_vllm.llm import LLM
    from mini_vllm.lora.request import LoRARequest

GRACE_S = 2.0
"""Seconds a process may take to end by itself before it is ended."""


class DataParallelLLM:
    """`LLM` over `data_parallel_size` engines; close it, or use it in a `with` block."""

    def __init__(
        self,
        model: str | Path = "byte-llama",
        *,
        data_parallel_size: int = 2,
        stats_interval_ms: int = 100,
        **knobs: Any,
    ) -> None:
        """Start the engines and wait until each has loaded the model.

        Args:
            model: a name or folder that every process can load.
            data_parallel_size: engines, at least 2.
            stats_interval_ms: milliseconds between two publications of their counts.
            knobs: of each engine, as `LLM` takes them.

        Raises:
            ValueError: an argument out of range, or refused by the engines.
        """
        whole("data_parallel_size", data_parallel_size, 2)
        if not isinstance(model, str | Path):
            raise ValueError(f"model={model!r}: need a name or a folder that every rank can load")
        self.coordinator = Coordinator(data_parallel_size, stats_interval_ms, False)
        self.balancer = LoadBalancer(data_parallel_size)
        self.ranks: dict[str, int] = {}
        """The rank of each request of the last `generate`, by request id."""
        self._num_asked = 0
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._close = Finalize(self, _end_all, (self._processes, self._pipes), exitpriority=10)
        try:
            for rank in range(data_parallel_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(theirs, str(model), knobs), name=f"data rank {rank}"
                )
                with without_main():
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            for rank in range(data_parallel_size):
                self._reply(rank)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DataParallelLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engines; a second call does nothing."""
        self._close()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        data_parallel_rank: int | Sequence[int | None] | None = None,
    ) -> list[RequestOutput]:
        """As `LLM.generate`; each prompt goes to the engine that the balancer chooses.

        Args:
            data_parallel_rank: the engine for all prompts, or one (or None) per prompt.

        Raises:
            ValueError: any prompt is refused (none is run), or there is no such rank.
            RuntimeError: a rank died; the message names it, and the others are ended.
        """
        if not self._close.still_active():
            raise ValueError("generate: this DataParallelLLM is closed; make a new one")
        prompts = [prompts] if isinstance(prompts, str) else prompts
        each = one_each(prompts, sampling_params, {"lora_request": lora_request})
        wanted = per_prompt("data_parallel_rank", data_parallel_rank, len(each))
        for rank in wanted:
            if rank is not None:
                whole("data_parallel_rank", rank, 0, len(self._pipes) - 1)
        try:
            return self._generate(each, wanted)
        except ValueError:
            raise  # refused before anything ran
        except BaseException:
            self.close()  # a rank is gone, or answers are still on their way
            raise

    def _generate(
        self, each: Sequence[tuple[Any, ...]], wanted: Sequence[int | None]
    ) -> list[RequestOutput]:
        """Ask, and wait for all answers."""
        self._send(0, ("check", each))
        self._reply(0)
        first, self._num_asked = self._num_asked, self._num_asked + len(each)
        ids = [f"dp-{number}" for number in range(first, self._num_asked)]
        self.ranks = {}
        for request_id, arguments, rank in zip(ids, each, wanted, strict=True):
            chosen = self.ranks[request_id] = self.balancer.choose(rank)
            self._send(chosen, ("add", request_id, arguments))
        answers: dict[str, RequestOutput] = {}
        while len(answers) < len(ids):
            now_ms = int(time.time() * 1000)
            ready = wait(self._pipes, self.coordinator.wait_ms(now_ms) / 1000)
            if not ready:
                for counts, _, _ in self.coordinator.publish(int(time.time() * 1000)).front:
                    if counts is not None:
                        self.balancer.update(counts)
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                finished, step, waiting, running = self._reply(rank)
                self.coordinator.on_counts(rank, 0, step, waiting, running)
                answers |= {output.request_id: output for output in finished}
        return [answers[request_id] for request_id in ids]

    def _send(self, rank: int, message: tuple[Any, ...]) -> None:
        try:
            self._pipes[rank].send(message)
        except OSError:
            raise self._died(rank) from None

    def _reply(self, rank: int) -> Any:
        """What a rank answers next.

        Raises:
            ValueError: it refused something.
            RuntimeError: it died, or raised.
        """
        try:
            kind, what = self._pipes[rank].recv()
        except (EOFError, OSError):
            raise self._died(rank) from None
        if kind == "refused":
            raise ValueError(what)
        if kind == "raised":
            raise RuntimeError(f"data rank {rank}: {what}")
        return what

    def _died(self, rank: int) -> RuntimeError:
        process = self._processes[rank]
        process.join(GRACE_S)
        return RuntimeError(f"data rank {rank} died (exit status {process.exitcode})")


def _end_all(processes: Iterable[BaseProcess], pipes: Iterable[Connection]) -> None:
    """A closed pipe asks a rank to end; who has not after `GRACE_S` is ended."""
    for pipe in pipes:
        pipe.close()
    deadline = time.monotonic() + GRACE_S / 2
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Connection, model: str, knobs: dict[str, Any]) -> None:
    """One rank: an engine that steps while it has work. It ends when the pipe closes."""
    from mini_vllm.llm import LLM

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # it reaches all; whoever began the ranks ends them
    try:
        llm = LLM(model, **knobs)
    except ValueError as refused:
        pipe.send(("refused", str(refused)))
        return
    pipe.send(("ready", None))
    try:
        _Rank(llm, pipe).run()
    except (EOFError, OSError):  # nobody is there any more
        return
    except Exception as raised:
        pipe.send(("raised", f"{type(raised).__name__}: {raised}"))


class _Rank:
    """The loop of one engine: take what has come, step, tell what has ended and who waits."""

    def __init__(self, llm: LLM, pipe: Connection) -> None:
        self.engine, self.pipe = llm.llm_engine, pipe
        self.stats = StepStats(self.engine)
        self.live: dict[str, tuple[Any, list[Request]]] = {}
        self.step = 0

    def run(self) -> None:
        while True:
            while not self.live or self.pipe.poll():
                self.take(self.pipe.recv())
            self.engine.step()
            self.step += 1
            ended = [i for i, (_, each) in self.live.items() if all(r.is_finished for r in each)]
            outputs = []
            for request_id in ended:
                prompt, each = self.live.pop(request_id)
                outputs.append(RequestOutput.of(request_id, each, prompt, self.engine.tokenizer))
            stats = self.stats.read()
            self.pipe.send(("stepped", (outputs, self.step, stats.waiting, stats.running)))

    def take(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        process = self.engine.inputs.process
        if kind == "check":
            try:
                for prompt, params, options in rest[0]:
                    process(prompt, params, **options)
            except ValueError as refused:
                self.pipe.send(("refused", str(refused)))
                return
            self.pipe.send(("fine", None))
            return
        request_id, (prompt, params, options) = rest
        _, requests = process(prompt, params, request_id, **options)
        self.engine.queue_requests(request_id, requests)
        self.live[request_id] = prompt, requests
