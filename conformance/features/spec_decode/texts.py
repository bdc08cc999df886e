"""The whole real engine with drafts on the shipped model, beside the mini engine.

    course engine run -m conformance.record spec-ngram-float32      # the real engine
    python -m conformance.texts spec_decode                         # any machine

`record` wraps the scheduler inside vLLM's engine core and notes every step in the format of
`recording.py`, drafts included, and the counters that vLLM itself reports. The command asks apart:
does the mini scheduler decide the same with these drafts? Does the mini engine, with its own
drafter and its own verifier, draft and accept the same tokens in every step, and say the same text?
Greedy, synchronous, float32 there and float64 here.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conformance import real_engine, recording, replay
from conformance.features import RECORDINGS
from conformance.features.core.recorder import MAX_STEPS, observe
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.plan import SchedulerOutput

DRAFT_LAYERS = 2
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    },
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
}


def workload(num_prompts: int = 64, max_tokens: int = 32) -> dict[str, Any]:
    """That of `real_engine`, with half the requests; the pool is small enough to preempt."""
    return {**real_engine.workload(num_prompts, max_tokens), "seed": 8}


def make_draft(folder: Path) -> Path:
    """A draft model from the shipped one: its first layers under its own head."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (real_engine.MODEL / name).exists():
            shutil.copy(real_engine.MODEL / name, folder / name)
    config = json.loads((real_engine.MODEL / "config.json").read_text())
    config["num_hidden_layers"] = DRAFT_LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(real_engine.MODEL / "model.safetensors")
    kept = {name: w for name, w in weights.items() if _layer(name) < DRAFT_LAYERS}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def _asked(method: str, draft: Path) -> dict[str, Any]:
    asked = dict(METHODS[method])
    return {**asked, "model": str(draft)} if method == "draft_model" else asked


# ---------------------------------------------------------------------- on the real engine


def record(method: str, draft: Path) -> dict[str, Any]:
    """Run the workload on vLLM with the engine core in this process.

    Returns:
        "recording" in the format of `recording.py`, "metrics" as vLLM counts them, "machine".
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
    import vllm

    work = workload()
    config = work["config"]
    llm = vllm.LLM(
        model=str(real_engine.MODEL),
        speculative_config=_asked(method, draft),
        dtype="float32",
        seed=0,
        async_scheduling=False,
        max_model_len=config["max_model_len"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        block_size=config["block_size"],
        num_gpu_blocks_override=config["num_blocks"],
        enable_prefix_caching=config["enable_prefix_caching"],
        gpu_memory_utilization=0.4,
        enforce_eager=True,
        disable_log_stats=False,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    asked = METHODS[method]
    config["max_num_batched_tokens"] = scheduler.max_num_scheduled_tokens
    config["speculative"] = {
        "method": asked["method"],
        "num_speculative_tokens": asked["num_speculative_tokens"],
        "num_lookahead_tokens": scheduler.num_lookahead_tokens,
        "use_eagle": scheduler.use_eagle,
    }
    entry = _drive(
        llm.llm_engine, scheduler, work, lambda **w: vllm.SamplingParams(temperature=0.0, **w)
    )
    metrics = {
        metric.name.removeprefix("vllm:spec_decode_"): getattr(
            metric, "value", getattr(metric, "values", None)
        )
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_")
    }
    machine = real_engine.provenance("float32")
    return {"recording": entry, "metrics": metrics, "machine": machine}


def _drive(engine: Any, scheduler: Any, work: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """Feed the workload step by step, and note what the scheduler is told and does."""
    steps: list[dict[str, Any]] = []
    outputs: dict[str, list[int]] = {}
    schedule, update = scheduler.schedule, scheduler.update_from_output
    take = scheduler.update_draft_token_ids

    def watched_schedule() -> Any:
        held = {r: [*q.spec_token_ids] for r, q in scheduler.requests.items() if q.spec_token_ids}
        plan = schedule()
        planned = {r: [*t] for r, t in plan.scheduled_spec_decode_tokens.items() if t}
        steps.append({**observe(scheduler, plan), "spec_token_ids": held, "draft_token_ids": {}})
        steps[-1]["scheduled_spec_decode_tokens"] = planned
        return plan

    def watched_update(plan: Any, output: Any) -> Any:
        live = {name: scheduler.requests[name] for name in plan.num_scheduled_tokens}
        steps[-1]["sampled_token_ids"] = {
            name: [*output.sampled_token_ids[output.req_id_to_index[name]]]
            for name in plan.num_scheduled_tokens
            if output.sampled_token_ids[output.req_id_to_index[name]]
        }
        found = update(plan, output)
        ended = sorted(name for name, request in live.items() if request.is_finished())
        steps[-1]["finished"] = ended
        steps[-1]["finish_reasons"] = {n: str(live[n].get_finished_reason()) for n in ended}
        outputs.update({name: list(request.output_token_ids) for name, request in live.items()})
        return found

    def watched_take(drafts: Any) -> None:
        pairs = zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        steps[-1]["draft_token_ids"] = {name: [int(t) for t in tokens] for name, tokens in pairs}
        take(drafts)

    pending = {event["step"]: event["add"] for event in work["events"]}
    scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update
    scheduler.update_draft_token_ids = watched_take
    while pending or scheduler.has_unfinished_requests():
        for add in pending.pop(len(steps), ()):
            engine.add_request(
                add["request_id"],
                {"prompt_token_ids": add["prompt_token_ids"]},
                params(max_tokens=add["max_tokens"], ignore_eos=add["ignore_eos"]),
                add["arrival_time"],
                priority=add["priority"],
            )
        engine.step()
        if len(steps) >= MAX_STEPS:
            raise RuntimeError(f"not finished after {len(steps)} steps")
    return {"upstream": recording.UPSTREAM, **work, "outputs": outputs, "steps": steps}


# ---------------------------------------------------------------------- on any machine


def mini_engine(entry: Mapping[str, Any], draft: Path) -> LLMEngine:
    """The mini engine under a recording's configuration."""
    config = entry["config"]
    method = config["speculative"]["method"]
    slots = config["max_num_seqs"] if method == "draft_model" else 0
    return LLMEngine(
        dtype="float64",
        speculative_config=_asked(method, draft),
        num_blocks=config["num_blocks"],
        block_size=config["block_size"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"] + slots,
        enable_prefix_caching=config["enable_prefix_caching"],
        max_model_len=config["max_model_len"],
    )


def run_mini(entry: Mapping[str, Any], draft: Path) -> tuple[dict[str, list[int]], list[Any], Any]:
    """The mini engine on the recorded arrivals: texts, drafts planned in each step, its stats."""
    engine = mini_engine(entry, draft)
    planned: list[dict[str, list[int]]] = []

    def note(plan: SchedulerOutput) -> None:
        planned.append({r: [*tokens] for r, tokens in plan.spec_token_ids.items()})

    engine.observers.append(note)
    pending = {event["step"]: event["add"] for event in entry["events"]}
    requests = {}
    for step in range(MAX_STEPS):
        for add in pending.pop(step, ()):
            wish = SamplingParams(max_tokens=add["max_tokens"], ignore_eos=add["ignore_eos"])
            name = engine.add_request(add["prompt_token_ids"], wish, request_id=add["request_id"])
            requests[name] = engine.requests[name]
        if not pending and not engine.has_unfinished_requests():
            break
        engine.step()
    assert engine.feature("spec_decode") is not None
    texts = {name: request.output_token_ids for name, request in requests.items()}
    return texts, planned, engine.feature("spec_decode").stats


def compare(found: Mapping[str, Any], draft: Path) -> tuple[list[str], str]:
    """What differs, in words, and a line that says what was compared."""
    entry = found["recording"]
    wrong = []
    num_steps, difference = replay.replay(entry)
    if difference is not None:
        wrong.append(f"scheduler: {difference}")
    texts, planned, stats = run_mini(entry, draft)
    for name, tokens in entry["outputs"].items():
        if texts.get(name) != tokens:
            wrong.append(f"text of {name}: recorded {tokens}, mini {texts.get(name)}")
    recorded = [step["scheduled_spec_decode_tokens"] for step in entry["steps"]]
    for index, (theirs, ours) in enumerate(zip(recorded, planned, strict=False)):
        if theirs != ours:
            wrong.append(f"drafts of step {index}: recorded {theirs}, mini {ours}")
            break
    counted = {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_accepted_tokens_per_pos": stats.num_accepted_tokens_per_pos,
    }
    for name, value in counted.items():
        if found["metrics"].get(name) != value:
            wrong.append(f"{name}: recorded {found['metrics'].get(name)}, mini {value}")
    line = f"{num_steps} steps, {len(texts)} texts, {counted}: {len(wrong)} differ"
    return wrong, line


def load(path: Path) -> dict[str, Any]:
    """A recording made by `record`."""
    (found,) = recording.lines(path)
    return found


def recorded(method: str) -> Iterator[dict[str, Any]]:
    """The run as one line, for `conformance.record`; needs the real engine."""
    with tempfile.TemporaryDirectory() as folder:
        yield record(method, make_draft(Path(folder)))


def main() -> int:
    """Compare every recorded run with the mini engine; returns the exit status."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        draft = make_draft(Path(folder))
        for path in sorted((RECORDINGS / "engine").glob("spec-*.jsonl.gz")):
            wrong, line = compare(load(path), draft)
            print(*wrong[:8], f"{path.name.removesuffix('.jsonl.gz')}: {line}", sep="\n")
            failed = failed or bool(wrong)
    return int(failed)
