"""A scheduler of this repository, or a learner's, in the real engine on the shipped model.

    course engine run -m conformance.own_scheduler arrivals [PART=FILE.py:NAME ...]
    course engine run -m conformance.own_scheduler say PROMPT MAX_TOKENS [PART=FILE.py:NAME ...]
    course engine run -m conformance.own_scheduler serve

`arrivals` serves the 128 prompts of `real_engine.workload` and prints every step in the form of the
recording that vLLM's own scheduler left of them. `say` continues one prompt. Both print how often
each public method of a part was called. `serve` has `vllm serve` plan by the mini scheduler: two
streams, a request that is refused, one that is given up, and the server's counters. The adapter is
`MiniScheduler` of `mini_vllm/entrypoints/vllm_scheduler.py`.
"""

from __future__ import annotations

import collections
import functools
import inspect
import json
import os
import sys
import time
import traceback
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conformance import real_engine, serve_stream
from labkit import processes
from labkit.modules import load_module
from mini_vllm import EngineParts

PARTS = ("scheduler", "kv_cache_manager", "block_pool")
"""The parts that a scheduler in the real engine uses; all others are the real engine's own."""
MAX_STEPS = 2000


def main(arguments: Sequence[str]) -> int:
    """Print what `labkit.processes.Ran.result` reads."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    calls: collections.Counter[str] = collections.Counter()
    what, *rest = arguments
    named = rest[2:] if what == "say" else rest  # a prompt may look like a part
    given = [argument for argument in named if argument.partition("=")[0] in PARTS]
    files = {argument.partition("=")[2].rpartition(":")[0] for argument in given}
    try:
        parts = dict(load(argument, calls) for argument in given)
        if what == "serve":
            found = served()
        elif what == "arrivals":
            found = arrivals(parts)
        else:
            found = say(parts, rest[0], int(rest[1]))
    except Exception as error:
        if (failed := own_failure(error, files)) is None:
            raise
        found = {"failed": failed}
    processes.answer({**found, "calls": dict(calls)})
    return 0


def load(argument: str, calls: collections.Counter[str]) -> tuple[str, Any]:
    """A part's name and its class, from `scheduler=FILE.py:Scheduler`, with its calls counted."""
    part, _, where = argument.partition("=")
    file, _, name = where.rpartition(":")
    return part, counted(part, getattr(load_module(file), name), calls)


def counted(part: str, kind: Any, calls: collections.Counter[str]) -> Any:
    """A subclass that counts the calls of its public methods, as "scheduler.schedule"; a part that
    is a function is left as it is."""
    if not isinstance(kind, type):
        return kind

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            calls[f"{part}.{name}"] += 1
            return method(*arguments, **named)

        return call

    names = [name for name in dir(kind) if not name.startswith("_")]
    methods = {name: inspect.getattr_static(kind, name) for name in names}
    own = {n: counting(n, m) for n, m in methods.items() if isinstance(m, types.FunctionType)}
    return type(kind.__name__, (kind,), own)


def own_failure(error: BaseException, files: set[str]) -> dict[str, Any] | None:
    """Where in a learner's file an error arose; None where it is not in one."""
    paths = {str(Path(file).resolve()) for file in files}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if str(Path(frame.filename).resolve()) in paths:
            return {
                "error": f"{type(error).__name__}: {error}", "file": frame.filename,
                "line": frame.lineno, "in": frame.name, "text": frame.line,
            }  # fmt: skip
    return None


def engine(parts: dict[str, Any], **settings: Any) -> Any:
    """The real engine in this process, with the adapter as its scheduler.

    The worker's process gets the configuration, and with it the name of the class.
    """
    import vllm

    from mini_vllm.entrypoints.vllm_scheduler import MiniScheduler

    MiniScheduler.parts = EngineParts(**parts)
    return vllm.LLM(
        dtype="float32", async_scheduling=False, enforce_eager=True, use_tqdm_on_load=False,
        scheduler_cls=f"{MiniScheduler.__module__}.{MiniScheduler.__name__}", **settings,
    )  # fmt: skip


def say(parts: dict[str, Any], prompt: str, max_tokens: int) -> dict[str, Any]:
    """Continue a prompt, greedily, under the default limits."""
    import vllm

    llm = engine(parts, model=str(real_engine.MODEL), seed=0, gpu_memory_utilization=0.3)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return {"text": output.outputs[0].text, "vllm": vllm.__version__}


def served() -> dict[str, Any]:
    """What clients of a server hear whose engine core plans by the mini scheduler."""
    port = serve_stream.free_port()
    url = f"http://127.0.0.1:{port}"
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # the engine core in a process of its own
    server = serve_stream.serve(
        port, "--scheduler-cls", "mini_vllm.entrypoints.vllm_scheduler.MiniScheduler"
    )
    try:
        serve_stream.wait_for(server, url)
        before = serve_stream.counters(url)
        answers = {prompt: serve_stream.stream(url, prompt) for prompt in serve_stream.PROMPTS}
        spent = {n: v - before[n] for n, v in serve_stream.counters(url).items()}
        refused = _status(url, {"structured_outputs": {"regex": "[a-z]+"}})
        _give_up(url)
        again = serve_stream.stream(url, serve_stream.PROMPTS[0])
        running = _wait_for(url, "vllm:num_requests_running{", 0.0)
    finally:
        serve_stream.end(server)
    return {
        "answers": answers, "counters": spent, "refused": refused, "again": again,
        "running": running,
    }  # fmt: skip


def _wait_for(url: str, name: str, value: float, seconds: float = 60.0) -> float:
    """A metric of the server, once it has a value, or what it is when the time is up."""
    end = time.monotonic() + seconds
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        named = [line for line in lines if name in line and line[0] != "#"]
        (line,) = [line for line in named if "_created" not in line]
        found = float(line.rsplit(" ", 1)[1])
        if found == value or time.monotonic() > end:
            return found
        time.sleep(0.2)


def _status(url: str, more: dict[str, Any]) -> int:
    """The HTTP status of a completion with something more asked for."""
    body = {"model": serve_stream.NAME, "prompt": "a", "max_tokens": 4, **more}
    post = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(post, timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _give_up(url: str) -> None:
    """Begin a long stream and leave after its first piece."""
    body = {"model": serve_stream.NAME, "prompt": "The", "max_tokens": 200, "ignore_eos": True,
            "stream": True}  # fmt: skip
    post = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(post, timeout=120) as answer:
        next(serve_stream.events(answer))


def arrivals(parts: dict[str, Any]) -> dict[str, Any]:
    """128 prompts as they arrive, their texts as token ids, and every step."""
    import vllm

    work = real_engine.workload()
    llm = engine(parts, **real_engine.options(work["config"]))
    core = llm.llm_engine.engine_core.engine_core
    steps: list[dict[str, Any]] = []
    schedule = core.scheduler.schedule

    def noting() -> Any:
        plan = schedule()
        steps.append(observe(core.scheduler, plan))
        return plan

    core.scheduler.schedule = noting
    outputs: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    pending = {event["step"]: event["add"] for event in work["events"]}
    while (pending or llm.llm_engine.has_unfinished_requests()) and len(steps) < MAX_STEPS:
        for add in pending.pop(len(steps), ()):
            params = vllm.SamplingParams(
                temperature=0.0, max_tokens=add["max_tokens"], ignore_eos=add["ignore_eos"]
            )
            prompt: Any = {"prompt_token_ids": add["prompt_token_ids"]}
            llm.llm_engine.add_request(
                add["request_id"], prompt, params, add["arrival_time"], priority=add["priority"]
            )
        for result in llm.llm_engine.step():
            if result.finished:
                outputs[result.request_id] = list(result.outputs[0].token_ids)
                reasons[result.request_id] = str(result.outputs[0].finish_reason)
    return {"outputs": outputs, "reasons": reasons, "steps": steps}


def observe(scheduler: Any, plan: Any) -> dict[str, Any]:
    """A step as `conformance.recorders.run.observe` notes those of vLLM's own scheduler, whose
    counters have advanced by then."""
    mini, counts = scheduler.mini, plan.num_scheduled_tokens
    return {
        "num_scheduled_tokens": dict(counts),
        "new": [data.req_id for data in plan.scheduled_new_reqs],
        "resumed": sorted(plan.scheduled_cached_reqs.resumed_req_ids),
        "preempted": sorted(plan.preempted_req_ids),
        "finished_before": sorted(plan.finished_req_ids),
        "running": [request.request_id for request in mini.running],
        "waiting": [request.request_id for request in mini.waiting],
        "block_ids": {r.request_id: mini.kv.get_block_ids(r.request_id) for r in mini.running},
        "num_computed_tokens": {
            r.request_id: r.num_computed_tokens + counts.get(r.request_id, 0) for r in mini.running
        },
        "free_blocks": mini.kv.block_pool.get_num_free_blocks(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
