"""The whole real engine on the shipped model, beside the mini engine on the same arrivals.

    course engine run -m conformance.record arrivals-float32     # needs vllm==0.22.1
    python -m conformance.real_engine FILE.jsonl.gz              # any machine

`record` wraps the scheduler inside vLLM's engine core and notes every step in the format of
`recording.py`, with the tokens that vLLM's model chose and their two likeliest candidates. The
program asks apart: given those tokens, does the mini scheduler decide the same? Was every read of
the KV cache sound? And does the mini model choose the same tokens, with each prompt alone, and with
the same arrivals? Greedy decoding in another precision may leave the recorded text where two
candidates are close, so each first difference is shown with both gaps.
Mirrors `vllm/v1/engine/core.py:428` `EngineCore.step`, `async_scheduling=False`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from conformance import recording, replay, shadow
from conformance.features.core.recorder import MAX_STEPS, observe
from labkit import versions
from mini_vllm import EngineParts, LLMEngine, Sampler, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "byte-llama"
EOS = 256
CONFIG = {
    "num_blocks": 120,
    "block_size": 16,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 256,
    "long_prefill_token_threshold": 0,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_model_len": 512,
    "policy": "fcfs",
}
"""Small on purpose: prompts are cut, prefixes shared, the pool runs out, requests are evicted."""
PROMPTS = Path(__file__).parent / "prompts.txt"
"""The glossary as it was when the engine was recorded: the page grows, the prompts stay."""
SHARED = tuple(name for name in CONFIG if name not in ("num_blocks", "policy"))
"""Arguments of both engines that have the same name."""


def workload(num_prompts: int = 128, max_tokens: int = 48) -> dict[str, Any]:
    """Prompts of `prompts.txt` in bytes: eight arrive at every third step.

    Every second one begins with the same 96 bytes, so that blocks are shared.
    """
    text = PROMPTS.read_bytes()
    common = text[:96]
    events: list[dict[str, Any]] = []
    for number in range(num_prompts):
        start = 200 + 97 * number
        own = text[start : start + 24 + 7 * (number % 19)]
        prompt = (common if number % 2 else b"") + own
        add = {
            "request_id": f"r{number}",
            "prompt_token_ids": list(prompt),
            "max_tokens": max_tokens,
            "priority": 0,
            "arrival_time": float(number),
            "ignore_eos": False,
        }
        if number % 8 == 0:
            events.append({"step": 3 * (number // 8), "add": [], "abort": []})
        events[-1]["add"].append(add)
    return {"seed": 0, "eos_token_id": EOS, "config": dict(CONFIG), "events": events}


def glossary_prompts(count: int, first: int, stride: int) -> list[list[int]]:
    """Bytes of `prompts.txt` from `first` on, one prompt per `stride`, 8 to 133 bytes each;
    every second begins with the same 40."""
    text = PROMPTS.read_bytes()
    made = []
    for number in range(count):
        start = first + stride * number
        own = text[start : start + 8 + 5 * (number % 18)]
        made.append(list(text[:40] + own if number % 2 else own))
    return made


def hazard(alone: bool = False) -> dict[str, Any]:
    """`hazard.WORKLOAD` in blocks of 16, in words, on the shipped model.

    The urgent request `high` makes `low` read stale KV; `again` sends the prompt of `low` once
    more. With `alone` there is `low` and nothing else.
    """
    low = b"1. Prefix caching looks up the blocks of a request by their hashes. "
    low += b"The first block that is not "
    texts = {"low": (0, 5, low), "high": (1, 0, b"What is a block?"), "again": (2, 9, low)}
    config = {**CONFIG, "num_blocks": 8, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    config |= {"long_prefill_token_threshold": 32, "max_model_len": 112, "policy": "priority"}
    events = []
    for name, (step, priority, text) in texts.items():
        add = {
            "request_id": name,
            "prompt_token_ids": list(text),
            "max_tokens": 16,
            "priority": priority,
            "arrival_time": float(step),
            "ignore_eos": True,
        }
        events.append({"step": step, "add": [add], "abort": []})
    events = events[:1] if alone else events
    return {"seed": 0, "eos_token_id": EOS, "config": config, "events": events}


WORKLOADS: dict[str, Callable[[], dict[str, Any]]] = {
    "arrivals": workload,
    "hazard": hazard,
    "alone": functools.partial(hazard, True),
}


# ---------------------------------------------------------------------- on the real engine


def drive(
    engine: Any,
    scheduler: Any,
    work: Mapping[str, Any],
    params: Any,
    adapters: Mapping[int, Any] | None = None,
) -> dict[str, Any]:
    """Feed a workload to an engine step by step, and note what its scheduler does.

    Args:
        engine: `add_request(id, prompt, params, arrival_time, priority=...)` and `step()`, as
            `vllm/v1/engine/llm_engine.py:209` `LLMEngine.add_request`.
        scheduler: the engine's own; `schedule` and `update_from_output` are wrapped meanwhile.
        params: makes the engine's sampling parameters from `max_tokens` and `ignore_eos`.
        adapters: the engine's own adapters, by the number that an arrival has as its "lora".

    Returns:
        "recording" in the format of `recording.py`, and "candidates": per request and token the
        two likeliest [token id, log probability], where the engine reports them.

    Raises:
        RuntimeError: one call of `step` scheduled twice, or the work did not end.
    """
    watched = _Watched(scheduler)
    candidates: dict[str, list[list[list[float]]]] = {}
    pending = {event["step"]: event["add"] for event in work["events"]}
    with watched:
        while pending or scheduler.has_unfinished_requests():
            number = len(watched.steps)
            for add in pending.pop(number, ()):
                engine.add_request(
                    add["request_id"],
                    {"prompt_token_ids": add["prompt_token_ids"]},
                    params(max_tokens=add["max_tokens"], ignore_eos=add["ignore_eos"]),
                    add["arrival_time"],
                    priority=add["priority"],
                    **_adapter_of(add, adapters),
                )
            for result in engine.step():
                if result.finished and result.outputs[0].logprobs:
                    rows = result.outputs[0].logprobs
                    candidates[result.request_id] = [_two_likeliest(row) for row in rows]
            scheduled = len(watched.steps) - number
            if scheduled != 1 or number >= MAX_STEPS:
                raise RuntimeError(f"step {number}: the engine scheduled {scheduled}x")
    told = {"outputs": watched.outputs, "steps": watched.steps}
    return {
        "recording": {"upstream": recording.UPSTREAM, **work, **told}, "candidates": candidates,
    }  # fmt: skip


def _adapter_of(add: Mapping[str, Any], adapters: Mapping[int, Any] | None) -> dict[str, Any]:
    return {"lora_request": adapters[add["lora"]]} if adapters and add.get("lora") else {}


class _Watched(contextlib.ExitStack):
    """A scheduler whose steps are noted while this is entered, with drafts where it has some."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.has_drafts = bool(getattr(scheduler, "num_spec_tokens", 0))
        self.steps: list[dict[str, Any]] = []
        self.outputs: dict[str, list[int]] = {}
        for name in ("schedule", "update_from_output", "update_draft_token_ids"):
            if call := getattr(scheduler, name, None):
                self.callback(setattr, scheduler, name, call)
                setattr(scheduler, name, functools.partial(getattr(self, f"_{name}"), call))

    def _schedule(self, call: Callable[[], Any]) -> Any:
        requests = self.scheduler.requests.items()
        held = {r: [*q.spec_token_ids] for r, q in requests if self.has_drafts and q.spec_token_ids}
        plan = call()
        self.steps.append(observe(self.scheduler, plan))
        if self.has_drafts:
            planned = {r: [*t] for r, t in plan.scheduled_spec_decode_tokens.items() if t}
            self.steps[-1] |= {"spec_token_ids": held, "draft_token_ids": {}}
            self.steps[-1]["scheduled_spec_decode_tokens"] = planned
        return plan

    def _update_from_output(self, call: Callable[..., Any], plan: Any, *rest: Any) -> Any:
        live = {name: self.scheduler.requests[name] for name in plan.num_scheduled_tokens}
        step = self.steps[-1]
        if self.has_drafts:
            (output,) = rest
            rows = {r: [*output.sampled_token_ids[output.req_id_to_index[r]]] for r in live}
            step["sampled_token_ids"] = {r: tokens for r, tokens in rows.items() if tokens}
        found = call(plan, *rest)
        ended = sorted(name for name, request in live.items() if request.is_finished())
        step["finished"] = ended
        step["finish_reasons"] = {n: str(live[n].get_finished_reason()) for n in ended}
        self.outputs |= {name: list(request.output_token_ids) for name, request in live.items()}
        return found

    def _update_draft_token_ids(self, call: Callable[[Any], Any], drafts: Any) -> None:
        pairs = zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        if self.has_drafts:
            said = {name: [int(token) for token in tokens] for name, tokens in pairs}
            self.steps[-1]["draft_token_ids"] = said
        call(drafts)


def _two_likeliest(row: Mapping[int, Any]) -> list[list[float]]:
    ranked = sorted(row.items(), key=lambda item: -item[1].logprob)
    return [[int(token), float(entry.logprob)] for token, entry in ranked[:2]]


def record(
    work: Mapping[str, Any], dtype: str, eager: bool = False, synchronous: bool = True
) -> dict[str, Any]:
    """Run a workload on vLLM with the engine core in this process; on its GPU or CPU build.

    Args:
        synchronous: else scheduling is left to the platform: a processor's is synchronous anyway.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
    if not eager:  # what is compiled is part of what is recorded
        os.environ.pop("TORCH_COMPILE_DISABLE", None)
    import vllm

    llm = vllm.LLM(
        dtype=dtype,
        async_scheduling=False if synchronous else None,
        enforce_eager=eager,
        **options(work["config"]),
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    found = drive(
        llm.llm_engine,
        scheduler,
        work,
        lambda **wishes: vllm.SamplingParams(temperature=0.0, logprobs=2, **wishes),
    )
    found["machine"] = provenance(dtype)
    return found


def options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `vllm.LLM` for the shipped model under a recording's `config`."""
    return {
        "model": str(MODEL),
        "seed": 0,
        **{name: config[name] for name in SHARED},
        "num_gpu_blocks_override": config["num_blocks"],
        "scheduling_policy": config["policy"],
        "gpu_memory_utilization": 0.4,
    }


def recorded(
    dtype: str, workload: str = "arrivals", eager: bool = True, synchronous: bool = True
) -> Iterator[dict[str, Any]]:
    """One line: `record` on a workload of `WORKLOADS`."""
    check_can_record()
    yield record(WORKLOADS[workload](), dtype, eager, synchronous)


def check_can_record() -> None:
    """Refuse in words where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("recording needs vllm==0.22.1, with or without a GPU: see SETUP.md")


def provenance(dtype: str) -> dict[str, str]:
    """What vLLM runs on here, and the command of this process, as a capture names them."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import cpuinfo  # vLLM's own way to ask

        device = {"processor": cpuinfo.get_cpu_info()["brand_raw"]}
    else:
        device = {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return {
        **device,
        "torch": torch.__version__,
        "vllm": versions.vllm() or vllm.__version__,
        "dtype": dtype,
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python -m conformance.record", *sys.argv[1:]]),
    }


# ---------------------------------------------------------------------- on any machine


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where the mini model left the recorded tokens of a request, and how close it was."""

    request_id: str
    position: int
    """Index among the request's output tokens."""
    recorded: int | None
    """None where the recorded text ended and the mini model's went on."""
    mini: int | None
    """None where the mini model's text ended first."""
    mini_gap: float | None
    """The mini model's logit of its token minus that of the recorded one, float64; 0 or more."""
    recorded_gap: float | None
    """Log probabilities of the recorded engine's two likeliest tokens, their difference."""


class _Watching(Sampler):
    def __init__(self) -> None:
        self.logits: list[np.ndarray] = []

    def sample(
        self,
        logits: np.ndarray,
        params: SamplingParams,
        rng: np.random.Generator | None = None,
    ) -> int:
        self.logits.append(logits.copy())
        return super().sample(logits, params, rng)


@functools.cache
def _watched() -> tuple[LLMEngine, _Watching]:
    """One engine for all questions, without a cache, so that none depends on another."""
    watching = _Watching()
    parts = EngineParts(sampler=lambda: watching)
    return LLMEngine(dtype="float64", enable_prefix_caching=False, parts=parts), watching


def _next_logits(tokens: list[int]) -> np.ndarray:
    """The mini model's logits [vocab_size] in float64 for the token behind `tokens`."""
    engine, watching = _watched()
    watching.logits.clear()
    engine.generate([tokens], SamplingParams(max_tokens=1))
    return watching.logits[-1]


def generate_alone(entry: Mapping[str, Any]) -> dict[str, list[int]]:
    """What the mini engine answers in float64 with memory for all: as if each prompt were alone."""
    adds = _adds(entry)
    engine = LLMEngine(num_blocks=2048, max_num_batched_tokens=2048, dtype="float64")
    prompts = [add["prompt_token_ids"] for add in adds]
    results = engine.generate(prompts, [_params(add) for add in adds])
    return {add["request_id"]: r.outputs[0].token_ids for add, r in zip(adds, results, strict=True)}


def generate_on_arrivals(
    entry: Mapping[str, Any], parts: EngineParts | None = None
) -> dict[str, list[int]]:
    """What the mini engine answers in float64 under the recorded configuration and arrivals.

    Args:
        parts: replacements in the mini engine, a scheduler of yours for example.
    """
    return run_on_arrivals(mini_engine(entry["config"], parts=parts), entry)


def mini_engine(config: Mapping[str, Any], **more: Any) -> LLMEngine:
    """The mini engine in float64 under a recording's `config`; `more` are further arguments."""
    chosen = {name: config[name] for name in (*SHARED, "num_blocks", "policy")}
    return LLMEngine(dtype="float64", **{**chosen, **more})


def run_on_arrivals(
    engine: LLMEngine, entry: Mapping[str, Any], adapters: Mapping[int, Any] | None = None
) -> dict[str, list[int]]:
    """What an engine answers to the recorded arrivals; `adapters` as for `drive`."""
    pending = {event["step"]: event["add"] for event in entry["events"]}
    requests = {}
    for step in range(MAX_STEPS):
        for add in pending.pop(step, ()):
            name = engine.add_request(
                add["prompt_token_ids"],
                _params(add),
                request_id=add["request_id"],
                priority=add["priority"],
                arrival_time=add["arrival_time"],
                **_adapter_of(add, adapters),
            )
            requests[name] = engine.requests[name]
        if not pending and not engine.has_unfinished_requests():
            break
        engine.step()
    else:
        raise RuntimeError(f"the workload did not end in {MAX_STEPS} steps")
    return {name: list(request.output_token_ids) for name, request in requests.items()}


def _adds(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [add for event in entry["events"] for add in event.get("add", ())]


def _params(add: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=add["max_tokens"], ignore_eos=add["ignore_eos"])


def first_differences(
    found: Mapping[str, Any], answers: Mapping[str, list[int]]
) -> list[FirstDifference]:
    """Where `answers`, the mini engine's by request, leave the recorded ones."""
    entry = found["recording"]
    differences = []
    for add in _adds(entry):
        name = add["request_id"]
        recorded, ours = entry["outputs"][name], answers[name]
        if recorded == ours:
            continue
        pairs = enumerate(itertools.zip_longest(recorded, ours))
        place, (theirs, mine) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        if theirs is None or mine is None:  # another end, not another token
            differences.append(FirstDifference(name, place, theirs, mine, None, None))
            continue
        logits = _next_logits(add["prompt_token_ids"] + ours[:place])
        rows = found.get("candidates", {}).get(name)
        gap = rows[place][0][1] - rows[place][1][1] if rows else None
        differences.append(
            FirstDifference(
                name,
                place,
                theirs,
                mine,
                float(logits[mine] - logits[theirs]),
                gap,
            )
        )
    return differences


def compare(found: Mapping[str, Any]) -> tuple[str, bool]:
    """The comparison in words, and whether every scheduling decision was the same."""
    entry = found["recording"]
    problem = recording.problem_of(entry)
    if problem:
        raise recording.RecordingError(problem)
    steps, difference = replay.replay(entry)
    lines = [f"recorded on: {', '.join(f'{k} {v}' for k, v in found['machine'].items())}"]
    preempted = sum(len(step["preempted"]) for step in entry["steps"])
    lines.append(
        f"scheduling, given the recorded tokens: {steps} of {len(entry['steps'])} steps, "
        f"{preempted} preemptions: {'1 differs' if difference else '0 differ'}"
    )
    if difference:
        lines.append(str(difference))
    stale = shadow.stale_reads(entry)
    lines.append(f"stale reads of the KV cache: {len(stale)}")
    told: list[FirstDifference] = []
    for how, generate in (
        ("on the same arrivals", generate_on_arrivals),
        ("each prompt alone", generate_alone),
    ):
        differences = first_differences(found, generate(entry))
        count = len(entry["outputs"])
        same = count - len(differences)
        lines.append(f"tokens, {how}: {same} of {count} texts equal ({same / count:.1%})")
        lines += [f"  {_in_words(each)}" for each in differences if each not in told]
        told = differences
    return "\n".join(lines), difference is None


def _in_words(each: FirstDifference) -> str:
    where = f"{each.request_id} token {each.position}: "
    if each.mini_gap is None:
        ended = "the recorded text" if each.recorded is None else "the mini model's"
        return f"{where}{ended} has ended, the other goes on"
    theirs = "unknown" if each.recorded_gap is None else f"{each.recorded_gap:.2e}"
    return (
        f"{where}recorded {each.recorded}, mini {each.mini}; gap {each.mini_gap:.2e} in mini's "
        f"logits, {theirs} in the recorded ones"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.real_engine", description="The mini engine against a run."
    )
    parser.add_argument("file", type=Path, help="a recorded run: conformance/recordings/engine/*")
    arguments = parser.parse_args(argv)
    try:
        (found,) = recording.lines(arguments.file)
        words, same = compare(found)
    except (ValueError, KeyError, TypeError, recording.RecordingError) as error:
        print(f"{arguments.file}: not a recorded engine: {error}", file=sys.stderr)
        return 2
    print(words)
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
