"""Record what the scheduler of a vLLM server decides, step by step, with times.

    vllm serve MODEL --scheduler-cls vllm_flight_recorder.Recording

Promises: nothing of a text and no token id is written, only lengths and hashes of blocks; the
server is never disturbed: what fails here ends the recording, says so once in the log, and the
server goes on; no more than `VLLM_FLIGHT_RECORDER_MAX_MB` lies on the disk. Nothing is imported but
the standard library and vLLM. README.md beside this file describes each line that is written.

`Recording` is vLLM's own scheduler, the asynchronous one where that is on, with five methods that
note what went in and what came out. It decides nothing.

Where the flag cannot be set, `Counting` is a stat logger, found by its entry point, which writes
what vLLM counts of each step where `VLLM_FLIGHT_RECORDER_COUNTS` is set: a poorer source, which
names no request while it runs. It obeys the same promises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
FORMAT = 1
"""Of the lines; a reader refuses another one."""
DIRECTORY = "VLLM_FLIGHT_RECORDER_DIR"
MAX_MB = "VLLM_FLIGHT_RECORDER_MAX_MB"
COUNTS = "VLLM_FLIGHT_RECORDER_COUNTS"
"""A folder; unset, the stat logger writes nothing."""
SEGMENTS = 4
"""Files of one recording; when a new one begins, the second oldest goes. The first one stays: it
holds the configuration and how it all began."""
FLUSH_S = 1.0
SHOWN = 64
"""Places of a queue that are written; its length always is."""

logger = logging.getLogger("vllm.flight_recorder")
encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Recording:
    """What `--scheduler-cls` names: makes a scheduler of the kind that the server asked for."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        is_async = bool(config.scheduler_config.async_scheduling)
        return recording(AsyncScheduler if is_async else Scheduler)(*args, **kwargs)


def recording(base: type) -> type:
    """A subclass of one of vLLM's schedulers that records what it decides.

    Each method calls vLLM's own first, or last where the state before it is needed, with whatever
    arguments the release passes, and gives back what that gave back.
    """

    class RecordingScheduler(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.flight = Recorder(self)

        def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().add_request(request, *args, **kwargs)
            self.flight.note("added", request)
            return result

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            plan = super().schedule(*args, **kwargs)
            self.flight.note("scheduled", plan, began)
            return plan

        def update_from_output(self, plan: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.flight.note("planned", plan)
            result = super().update_from_output(plan, output, *args, **kwargs)
            self.flight.note("updated", plan, output, before)
            return result

        def update_draft_token_ids(self, drafts: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().update_draft_token_ids(drafts, *args, **kwargs)
            self.flight.note("drafted", drafts)
            return result

        def finish_requests(self, request_ids: Any, status: Any, *args: Any, **kwargs: Any) -> Any:
            asked = self.flight.note("live", request_ids)
            result = super().finish_requests(request_ids, status, *args, **kwargs)
            self.flight.note("finished", asked, result, status)
            return result

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
            result = super().reset_prefix_cache(*args, **kwargs)
            self.flight.note("reset", args, kwargs, result)
            return result

        def shutdown(self, *args: Any, **kwargs: Any) -> Any:
            self.flight.note("close")
            return super().shutdown(*args, **kwargs)

    RecordingScheduler.__name__ = f"Recording{base.__name__}"
    return RecordingScheduler


class Recorder:
    """What is known of one scheduler, and the files that it goes into."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.files: Files | None = None
        self.is_on = True
        self.numbers: dict[str, int] = {}
        """Of the live requests: lines name a request by its number."""
        self.num_requests = self.num_steps = 0
        self.hashed: dict[int, int] = {}
        """How many block hashes of a request are written."""
        self.started: set[int] = set()
        """Requests that have been in a plan."""
        self.compiling: dict[int, Any] = {}
        """Requests whose grammar is not ready."""
        self.plans: dict[int, int] = {}
        """The steps whose plans are under way, by the identity of the plan."""
        self.tokens: dict[str, int] = {}
        self.said: list[int] = []
        self.queues: dict[str, tuple[int, list[Any]]] = {}
        """Plan, counts of tokens said and queues as they were written last: each is written where
        it is another one."""
        self.key = os.urandom(16)
        self.note("begin")

    def note(self, method: str, *arguments: Any) -> Any:
        """Call one of the methods below. A failure ends the recording and reaches no further."""
        if not self.is_on:
            return None
        try:
            return getattr(self, method)(*arguments)
        except Exception as error:
            self.is_on = False
            logger.warning("The flight recorder has stopped: %s: %s", type(error).__name__, error)
            if self.files is not None:
                self.files.close()
            return None

    def begin(self) -> None:
        """Open the first file and describe the engine."""
        directory = Path(os.environ.get(DIRECTORY) or "flight-recordings")
        self.files = Files(directory, int(float(os.environ.get(MAX_MB) or 1024) * 1e6))
        self.files.write(head_of(self.scheduler))
        logger.info("The flight recorder writes %s", self.files.path)

    def joined(self, hashes: Any) -> str:
        """Hashes of blocks as one text, sixteen characters each, under a key of this recording:
        equal blocks are seen to be equal, and no guess at a text can be tried."""
        key = self.key
        return b"".join(blake2b(each, digest_size=8, key=key).digest() for each in hashes).hex()

    def write(self, line: dict[str, Any]) -> None:
        if self.files is not None:
            self.files.write(line)

    # -------------------------------------------------------------- what comes in

    def added(self, request: Any) -> None:
        """A request has entered a queue."""
        if request.request_id in self.numbers:
            raise NotImplementedError("a session that goes on with more input")
        number = self.numbers[request.request_id] = self.num_requests
        self.num_requests += 1
        hashes = request.block_hashes
        self.hashed[number] = len(hashes)
        params = request.sampling_params
        line = {
            "add": number, "id": request.request_id, "t": now(),
            "prompt": request.num_prompt_tokens, "max": request.max_tokens,
            "priority": request.priority, "at": request.arrival_time,
            "hashes": self.joined(hashes),
        }  # fmt: skip
        if getattr(params, "min_tokens", 0):
            line["min"] = params.min_tokens
        if request.lora_request is not None:
            line["lora"] = request.lora_request.lora_int_id
        if getattr(request, "use_structured_output", False):
            line["grammar"] = True
            self.compiling[number] = request
        if request.mm_features:
            line["pictures"] = [
                [str(each.identifier)[:12], each.mm_position.offset, each.mm_position.length]
                for each in request.mm_features
            ]
        if getattr(request, "skip_reading_prefix_cache", False):
            line["unread"] = True
        self.write(line)

    def live(self, request_ids: Any) -> list[str]:
        """Which of these requests there are, before they are ended."""
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        requests = self.scheduler.requests
        return [r for r in (requests if request_ids is None else request_ids) if r in requests]

    def finished(self, live: list[str], result: Any, status: Any) -> None:
        """Requests were ended from outside, in the order that vLLM gives back."""
        # Pairs with a client at the pin, requests later; before, nothing.
        given = [getattr(each, "request_id", None) or each[0] for each in result or ()]
        ended = [r for r in given or live if r in self.numbers]
        if ended:
            line = {"end": [self.numbers[r] for r in ended], "t": now(), "why": reason(status)}
            self.write(line)
        for request_id in ended:
            self.forget(request_id)

    def reset(self, args: Any, kwargs: Any, result: Any) -> None:
        """The prefix cache was emptied, or was not."""
        running = bool(args[0] if args else kwargs.get("reset_running_requests", False))
        self.write({"reset": bool(result), "running": running, "t": now()})

    def drafted(self, drafts: Any) -> None:
        """Drafts were handed over: how many each request then holds."""
        requests = self.scheduler.requests
        held = [
            (self.numbers[r], len(requests[r].spec_token_ids))
            for r in drafts.req_ids
            if r in self.numbers and r in requests
        ]
        self.write({"drafts": pairs(held)})

    # -------------------------------------------------------------- a step

    def scheduled(self, plan: Any, began: float) -> None:
        """A plan was made."""
        ended = time.perf_counter()
        numbers, scheduler = self.numbers, self.scheduler
        tokens = plan.num_scheduled_tokens
        line: dict[str, Any] = {
            "step": self.num_steps, "t": [round(began, 6), round(ended, 6)],
        }  # fmt: skip
        if tokens != self.tokens or list(tokens) != list(self.tokens):
            self.tokens = dict(tokens)
            line["plan"] = pairs((numbers[r], n) for r, n in tokens.items())
        blocks: list[Any] = []
        new: list[tuple[int, int]] = []
        resumed: list[tuple[int, int]] = []
        for each in plan.scheduled_new_reqs:
            number = numbers[each.req_id]
            # The second model runner gets a resumed request as if it were new.
            (resumed if number in self.started else new).append((number, each.num_computed_tokens))
            blocks += number, tables(each.block_ids)
        self.started.update(number for number, _ in new)
        cached = plan.scheduled_cached_reqs
        for request_id, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                resumed.append((numbers[request_id], computed))
            if ids is not None and any(ids):
                blocks += numbers[request_id], tables(ids)
        if new:
            line["new"] = pairs(new)
        if resumed:
            line["resumed"] = pairs(resumed)
        if blocks:
            line["blocks"] = blocks
        if plan.preempted_req_ids:
            line["preempted"] = sorted(numbers[r] for r in plan.preempted_req_ids if r in numbers)
        if ready := [n for n, r in self.compiling.items() if not r.status.name.endswith("GRAMMAR")]:
            line["ready"] = ready  # found compiled in this step
            for number in ready:
                del self.compiling[number]
        if drafts := plan.scheduled_spec_decode_tokens:
            line["spec"] = pairs((numbers[r], len(ids)) for r, ids in drafts.items())
        if encoded := plan.scheduled_encoder_inputs:
            line["encoded"] = [x for r, which in encoded.items() for x in (numbers[r], list(which))]
        if plan.free_encoder_mm_hashes:
            line["unencoded"] = [str(each)[:12] for each in plan.free_encoder_mm_hashes]
        line["free"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.queue(line, "running", scheduler.running)
        self.queue(line, "waiting", scheduler.waiting)
        self.queue(line, "skipped", getattr(scheduler, "skipped_waiting", ()))
        while len(self.plans) > 64:  # of steps that were never updated
            del self.plans[next(iter(self.plans))]
        self.plans[id(plan)] = self.num_steps
        self.num_steps += 1
        self.write(line)

    def queue(self, line: dict[str, Any], name: str, requests: Any) -> None:
        """A queue, where it is not as in the last line: its length, and its first places."""
        first, length = list(islice(requests, SHOWN)), len(requests)
        if self.queues.get(name, (0, [])) != (length, first):
            self.queues[name] = (length, first)
            line[name] = [length, *(self.numbers.get(r.request_id, -1) for r in first)]

    def planned(self, plan: Any) -> list[tuple[str, Any, int]]:
        """The requests of a plan that live, and how many tokens each has said."""
        live = self.scheduler.requests
        found = [(r, live[r]) for r in plan.num_scheduled_tokens if r in live]
        return [(r, request, request.num_output_tokens) for r, request in found]

    def updated(self, plan: Any, output: Any, before: list[tuple[str, Any, int]]) -> None:
        """The tokens of a plan were handed over."""
        rows, index = output.sampled_token_ids, output.req_id_to_index
        line: dict[str, Any] = {"out": self.plans.pop(id(plan), -1), "t": round(now(), 6)}
        said: list[int] = []
        kept: list[int] = []
        ended: list[Any] = []
        hashes: list[Any] = []
        numbers, hashed, live = self.numbers, self.hashed, self.scheduler.requests
        waits = self.scheduler.connector is not None  # some stay until their blocks are sent
        for request_id, request, num_output in before:
            number = numbers[request_id]
            count = len(rows[index[request_id]]) if rows else 0
            added = request.num_output_tokens - num_output
            if count:
                said += number, count
            if added != count:
                kept += number, added
            if len(request.block_hashes) != hashed[number]:
                hashes += number, self.joined(request.block_hashes[hashed[number] :])
                hashed[number] = len(request.block_hashes)
            if request_id not in live or (waits and request.is_finished()):
                ended += number, reason(request.status)
                self.forget(request_id)
        if said != self.said:
            line["said"] = self.said = said
        for name, found in (("kept", kept), ("ended", ended), ("hashes", hashes)):
            if found:
                line[name] = found
        self.write(line)

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        number = self.numbers.pop(request_id)
        self.hashed.pop(number, None)
        self.started.discard(number)
        self.compiling.pop(number, None)

    def close(self) -> None:
        """The engine serves no more."""
        self.write({"close": self.num_steps, "t": now()})
        self.is_on = False
        if self.files is not None:
            self.files.close()


class Files:
    """Lines into files of a bounded size; the newest ones and the first are kept."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        if max_bytes < 1e6:
            raise ValueError(f"{MAX_MB}={max_bytes / 1e6:g}: need at least 1")
        directory.mkdir(parents=True, exist_ok=True)
        self.stem = directory / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.most = max_bytes // SEGMENTS
        self.number = -1
        self.head = b""
        self.flushed = time.monotonic()
        self.open()

    @property
    def path(self) -> Path:
        """The file that is written."""
        return Path(f"{self.stem}.{self.number:04d}.jsonl")

    def open(self) -> None:
        self.number += 1
        self.size = 0
        self.file = self.path.open("xb", buffering=1 << 20)
        if self.number - SEGMENTS + 1 > 0:
            Path(f"{self.stem}.{self.number - SEGMENTS + 1:04d}.jsonl").unlink(missing_ok=True)

    def write(self, line: dict[str, Any]) -> None:
        """One line; what is written lies on the disk within about a second of the next one."""
        text = encode(line).encode() + b"\n"
        if self.size and self.size + len(text) > self.most:
            self.file.close()
            self.open()
        self.size += self.file.write(text)
        if time.monotonic() - self.flushed > FLUSH_S:
            self.file.flush()
            self.flushed = time.monotonic()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: what could be written is there
            self.file.close()


# ---------------------------------------------------------------------- the poorer source


class Counter:
    """What vLLM tells its stat loggers, a line for each step that it tells of."""

    def __init__(self, directory: str) -> None:
        self.files: Files | None = None
        self.is_on = bool(directory)
        self.note("begin", directory)

    def note(self, method: str, *arguments: Any) -> None:
        """As of a `Recorder`: a failure ends the counting and reaches no further."""
        if self.is_on:
            try:
                getattr(self, method)(*arguments)
            except Exception as error:
                self.is_on = False
                logger.error("vllm-flight-recorder stops counting: %r", error)

    def begin(self, directory: str) -> None:
        most = int(float(os.environ.get(MAX_MB, "1024")) * 1e6)
        self.files = Files(Path(directory), most)
        self.files.write({"counts": FORMAT, "vllm": version(), "t": now()})

    def counted(self, scheduler: Any, iteration: Any) -> None:
        line: dict[str, Any] = {"t": now()}
        if scheduler is not None:
            line["running"] = scheduler.num_running_reqs
            line["waiting"] = scheduler.num_waiting_reqs
            line["usage"] = round(scheduler.kv_cache_usage, 6)
        if iteration is not None:
            line["prompt"] = iteration.num_prompt_tokens
            line["out"] = iteration.num_generation_tokens
            line["preempted"] = iteration.num_preempted_reqs
            ended = [
                [r.num_prompt_tokens, r.num_generation_tokens, round(r.queued_time, 6)]
                for r in iteration.finished_requests
            ]
            if ended:
                line["ended"] = ended
        assert self.files is not None
        self.files.write(line)


def __getattr__(name: str) -> Any:
    """`Counting`, a class of vLLM's kind, made where a server asks for it."""
    if name != "Counting":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counting(StatLoggerBase):
        """What the entry point names."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self.counter = Counter(os.environ.get(COUNTS, ""))

        def record(
            self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any
        ) -> None:
            self.counter.note("counted", scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    globals()[name] = Counting
    return Counting


# ---------------------------------------------------------------------- what is written


def version() -> str:
    """Of the vLLM that runs."""
    import vllm

    return vllm.__version__


def head_of(scheduler: Any) -> dict[str, Any]:
    """The first line: the release and every knob that decides."""
    manager, config = scheduler.kv_cache_manager, scheduler.scheduler_config
    groups = []
    for group in scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        found = {"kind": type(spec).__name__, "block_size": spec.block_size}
        if getattr(spec, "sliding_window", None):
            found["sliding_window"] = spec.sliding_window
        groups.append(found)
    line = {
        "flight": FORMAT, "vllm": version(), "scheduler": type(scheduler).__mro__[1].__name__,
        "t": now(), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "num_blocks": manager.block_pool.num_gpu_blocks,
        "block_size": scheduler.block_size,
        "hash_block_size": getattr(manager.block_pool, "hash_block_size", scheduler.block_size),
        "groups": groups,
        "max_num_seqs": scheduler.max_num_running_reqs,
        "max_num_batched_tokens": scheduler.max_num_scheduled_tokens,
        "max_model_len": scheduler.max_model_len,
        "enable_prefix_caching": bool(manager.enable_caching),
        "policy": getattr(config.policy, "value", config.policy),
        "knobs": scalars(config) | scalars(scheduler.cache_config),
    }  # fmt: skip
    if getattr(scheduler, "num_spec_tokens", 0):
        line["speculative"] = {
            "num_speculative_tokens": scheduler.num_spec_tokens,
            "num_lookahead_tokens": scheduler.num_lookahead_tokens,
            "use_eagle": bool(scheduler.use_eagle),
        }
    if scheduler.lora_config is not None:
        line["max_loras"] = scheduler.lora_config.max_loras
    if getattr(scheduler, "connector", None) is not None:
        line["connector"] = type(scheduler.connector).__name__
    if budget := getattr(scheduler, "max_num_encoder_input_tokens", 0):
        line["encoder"] = [budget, scheduler.encoder_cache_manager.cache_size]
    return line


def scalars(config: Any) -> dict[str, Any]:
    """The plain settings of a configuration, by name; texts that are no words are left out."""
    found = {}
    for name, value in sorted(getattr(config, "__dict__", {}).items()):
        if value is None or type(value) in (bool, int, float):
            found[name] = value
    return found


def reason(status: Any) -> str:
    """Why a request ended, as `Request.get_finished_reason` says it."""
    name = getattr(status, "name", str(status)).removeprefix("FINISHED_").lower()
    return {"stopped": "stop", "length_capped": "length", "aborted": "abort"}.get(name, name)


def tables(ids: Any) -> Any:
    """Block ids: a list, or a list per group where there are several."""
    return [list(each) for each in ids] if len(ids) > 1 else list(ids[0])


def pairs(found: Any) -> list[int]:
    """[a, b, c, d] for (a, b) and (c, d)."""
    return [each for pair in found for each in pair]


def now() -> float:
    """The clock of all lines but `date`: seconds, of this process."""
    return time.perf_counter()
