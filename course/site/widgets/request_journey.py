"""One request on its way through a front end and an engine core, hop by hop: what the widget shows.

Promises: every field is read off the mini engine's own objects while its `EngineCore` serves the
request over a pipe; only names, places and sentences are ours. Mirrors `vllm/v1/engine/core.py:835`
`EngineCoreProc`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from course.site.addresses import source_link
from course.truth import citations
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.entrypoints.engine_core import Delta, EngineCore
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request

PROMPT = "A scheduler "
PARAMS = SamplingParams(max_tokens=3)
BUDGET = 8
BLOCK_SIZE = 4
NAME = "A"


@dataclass(frozen=True, slots=True)
class Hop:
    """A place on the way: where it is, the type that leaves it upstream, and the line there."""

    title: str
    side: str
    """"front", "core", or "wire" between the two processes."""
    carries: str
    does: str
    source: str
    """A citation."""


HOPS: dict[str, Hop] = {
    "call": Hop("You call", "front", "prompt, SamplingParams",
        "Intent: a text and wishes.",
        "`vllm/v1/engine/async_llm.py:524` `AsyncLLM.generate`"),
    "tokenize": Hop("Tokenize, check", "front", "EngineCoreRequest",
        "The text becomes ids; what could never be served is refused here.",
        "`vllm/v1/engine/input_processor.py:234` `InputProcessor.process_inputs`"),
    "send": Hop("ZMQ, in", "wire", "message",
        "Plain data crosses to another process. vLLM: ZMQ and msgpack; mini_vllm: a pipe.",
        "`vllm/v1/engine/core_client.py:1033` `AsyncMPClient._send_input`"),
    "request": Hop("Queue", "core", "Request",
        "Live state begins: it waits, nothing is computed.",
        "`vllm/v1/engine/core.py:794` `EngineCore.preprocess_add_request`"),
    "schedule": Hop("Schedule", "core", "SchedulerOutput",
        "The plan of one step: how many tokens of whom, in which blocks.",
        "`vllm/v1/core/sched/scheduler.py:329` `Scheduler.schedule`"),
    "execute": Hop("Execute", "core", "the batch of tensors",
        "The runner turns the plan into arrays and runs the model.",
        "`vllm/v1/worker/gpu_model_runner.py:3955` `GPUModelRunner.execute_model`"),
    "sample": Hop("Sample", "core", "ModelRunnerOutput",
        "A token, if the request has caught up with itself.",
        "`vllm/v1/worker/gpu_model_runner.py:4320` `GPUModelRunner.sample_tokens`"),
    "update": Hop("Update", "core", "Request",
        "The token is written down; has it ended?",
        "`vllm/v1/core/sched/scheduler.py:1283` `Scheduler.update_from_output`"),
    "news": Hop("ZMQ, out", "wire", "EngineCoreOutput",
        "What is new goes back, and no more.",
        "`vllm/v1/engine/core.py:1495` `EngineCoreProc.process_output_sockets`"),
    "detokenize": Hop("Detokenize", "front", "text",
        "Ids become text; bytes of an unfinished character are held back.",
        "`vllm/v1/engine/detokenizer.py:95` `BaseIncrementalDetokenizer.update`"),
    "output": Hop("You read", "front", "RequestOutput",
        "What you asked for, so far.",
        "`vllm/v1/engine/output_processor.py:576` `OutputProcessor.process_outputs`"),
}  # fmt: skip
"""In the order of the way."""


class Recorder:
    """The pipe's other end, and a pair of eyes in the engine: notes every hop's object."""

    def __init__(self) -> None:
        self.engine = LLMEngine(
            dtype="float64", max_num_batched_tokens=BUDGET, block_size=BLOCK_SIZE, num_blocks=16
        )
        self.stops: list[dict[str, Any]] = []
        self.step = 0
        self._text = ""
        self._request: Request
        self._message = ("open", 1, NAME, (PROMPT, PARAMS))
        self._inbox: list[Any] = [self._message]
        self._ended = threading.Event()
        self.engine.observers.append(self._planned)
        self._execute = self.engine.runner.execute
        self.engine.runner.execute = self._run  # type: ignore[method-assign]
        self._sample = self.engine.row_sampler.sample
        self.engine.row_sampler.sample = self._pick  # type: ignore[method-assign]

    def note(self, hop: str, fields: Mapping[str, Any]) -> None:
        """Add a stop; values are written as Python writes them."""
        shown = {name: repr(value) for name, value in fields.items()}
        self.stops.append({"hop": hop, "step": self.step, "fields": shown})

    # what the core asks of a pipe

    def recv(self) -> Any:
        """The next message; the other side leaves once its request has ended."""
        if not self._inbox:
            self._ended.wait(60)
            raise EOFError
        return self._inbox.pop(0)

    def close(self) -> None:
        """Nothing to close."""

    def send(self, message: tuple[Any, ...]) -> None:
        """What the core says."""
        if message[0] == "answer":
            self._opened()
        elif message[0] == "news":
            self._told(message[1][0].deltas[0] if message[1] else None)
        else:
            raise RuntimeError(f"the core said {message!r}")

    def _opened(self) -> None:
        request = self._request = self.engine.requests[NAME]
        asked = {"temperature": PARAMS.temperature, "max_tokens": PARAMS.max_tokens}
        self.note("call", {"prompt": PROMPT, **asked})
        self.note("tokenize", {
            "request_id": request.request_id, "prompt_token_ids": request.prompt_token_ids,
            "eos_token_id": request.eos_token_id, "priority": request.priority, **asked,
        })  # fmt: skip
        kind, number, name, _ = self._message
        inside = _Word("prompt, SamplingParams")
        self.note("send", {"kind": kind, "number": number, "name": name, "arguments": inside})
        self.note("request", self._counters())

    def _counters(self) -> dict[str, Any]:
        request = self._request
        held = self.engine.scheduler.kv.get_block_ids(NAME)
        return {
            "status": _Word(request.status.name), "num_tokens": request.num_tokens,
            "num_computed_tokens": request.num_computed_tokens, "blocks held for it": held,
        }  # fmt: skip

    def _planned(self, plan: SchedulerOutput) -> None:
        self.step += 1
        self.note("schedule", {
            "num_scheduled_tokens": plan.num_scheduled_tokens,
            "num_computed_tokens": plan.num_computed_tokens,
            "new": plan.scheduled_new_req_ids, "block_ids": dict(plan.block_ids),
        })  # fmt: skip

    def _run(self, plan: SchedulerOutput) -> np.ndarray:
        batch = self.engine.runner.prepare_batch(plan)
        logits = self._execute(plan)
        self.note("execute", {
            "token_ids": batch.token_ids.tolist(), "positions": batch.positions.tolist(),
            "slot_mapping": batch.slot_mapping.tolist(), "seq_lens": batch.seq_lens.tolist(),
            "logits": _Word(f"{list(logits.shape)}"),
        })  # fmt: skip
        return logits

    def _pick(self, plan: SchedulerOutput, logits: np.ndarray, in_flight: Any) -> Any:
        sampled, failed = self._sample(plan, logits, in_flight)
        ids = list(sampled.get(NAME, ()))
        self.note(
            "sample", {"req_ids": list(plan.num_scheduled_tokens), "sampled_token_ids": [ids]}
        )
        return sampled, failed

    def _told(self, delta: Delta | None) -> None:
        self.note("update", self._counters())
        if delta is None:
            return
        ids = delta.token_ids
        self.note("news", {
            "request_id": NAME, "new_token_ids": ids, "finish_reason": delta.finish_reason,
        })  # fmt: skip
        self.note("detokenize", {"new_token_ids": ids, "new text": delta.text})
        self._text += delta.text
        self.note("output", {
            "request_id": NAME, "text": self._text, "finished": delta.finish_reason is not None,
            "finish_reason": delta.finish_reason,
        })  # fmt: skip
        if delta.finish_reason is not None:
            self._ended.set()


class _Word(str):
    """A text that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


@functools.cache
def stops() -> list[dict[str, Any]]:
    """Every stop of the request: hop, step (0: before the first), and the fields it carries."""
    recorder = Recorder()
    EngineCore(recorder.engine, recorder).run()  # type: ignore[arg-type]
    return recorder.stops


def cited(hop: Hop) -> citations.Citation:
    """Where the hop is in the pinned tree."""
    here = Path(__file__)
    [[found], _] = citations.in_text(hop.source, here.with_suffix(".md"), here.parents[3])
    return found


def _last(hop: str, field: str, step: int | None = None) -> str:
    found = [s for s in stops() if s["hop"] == hop and step in (None, s["step"])]
    return str(found[-1]["fields"][field])


def questions() -> list[dict[str, Any]]:
    """What is asked, the answer, and the stop that shows it."""
    steps = max(stop["step"] for stop in stops())
    first = next(i for i, stop in enumerate(stops()) if stop["hop"] == "sample")
    told = [i for i, stop in enumerate(stops()) if stop["hop"] == "news"]
    last = max(i for i, stop in enumerate(stops()) if stop["hop"] == "update")
    asked = (
        (f"{len(PROMPT)} prompt tokens, at most {BUDGET} tokens a step, max_tokens "
         f"{PARAMS.max_tokens}. How many times round the loop?", steps, len(stops()) - 1,
         "8 of the prompt, then 4 and a token; two tokens more take two steps more."),
        ("How many tokens does step 1 sample?",
         0 if _last("sample", "sampled_token_ids", 1) == "[[]]" else 1, first,
         "Its 8 tokens do not reach the prompt's end."),
        ("How many messages go back?", len(told), told[-1],
         "One for each step that sampled."),
        ("When it has ended, how many tokens are computed?",
         int(_last("update", "num_computed_tokens")), last,
         "12 + 3, less the last token, which nothing has read."),
    )  # fmt: skip
    return [
        {"ask": ask, "answer": answer, "stop": stop, "because": why}
        for ask, answer, stop, why in asked
    ]


def document() -> dict[str, Any]:
    """The widget's document."""
    hops = {}
    for name, hop in HOPS.items():
        place = cited(hop)
        hops[name] = {
            "title": hop.title, "side": hop.side, "carries": hop.carries, "does": hop.does,
            "line": f"{place.path}:{place.first}", "symbol": place.symbol,
            "link": source_link(place),
        }  # fmt: skip
    return {"hops": hops, "stops": stops(), "questions": questions()}
