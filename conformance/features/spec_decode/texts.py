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

import numpy as np

from conformance import real_engine, recording, replay
from conformance.features import RECORDINGS
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
    "ngram-tp2": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    },
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "draft_model-tp2": {"method": "draft_model", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "mtp-short": {"method": "mtp", "num_speculative_tokens": 3, "max_model_len": 240},
}
"""By the name of the recording. In the last one some steps are too long for the drafter."""
RANKS = {"ngram-tp2": 2, "draft_model-tp2": 2}
"""`tensor_parallel_size` where it is not 1."""
MODULE = real_engine.ROOT / "models" / "byte-mtp"
ALONE = b"The block table of a request lists its physical blocks"
"""A prompt that is served alone, once more with the logits of every draft noted."""
TOLERANCE = 1e-4
"""Of those logits, float32 on both sides; they reach some tens, so a rounding is some 1e-6."""

MOST_FORGIVEN = 2
"""Request-steps whose drafts may differ. While a request is too long for the drafter nothing is
written for it, and what the slots hold is read later: there the real engine has left rows of
rejected drafts, which the mini engine does not compute."""


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
    models = {"draft_model": {"model": str(draft)}, "mtp": {"model": str(MODULE)}}
    return METHODS[method] | models.get(METHODS[method]["method"], {})


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
    more: dict[str, Any] = {"tensor_parallel_size": RANKS.get(method, 1)}
    if method in RANKS:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if (
        METHODS[method]["method"] == "mtp"
    ):  # its module reads the target's config, which must know of it
        extension = "conformance.features.spec_decode.worker.DraftLogits"
        more |= {"hf_overrides": {"num_nextn_predict_layers": 1}, "worker_extension_cls": extension}
    llm = vllm.LLM(
        dtype="float32",
        async_scheduling=False,
        enforce_eager=True,
        speculative_config=_asked(method, draft),
        disable_log_stats=False,
        **more,
        **real_engine.options(config),
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
    found = real_engine.drive(
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
    line = {"recording": found["recording"], "metrics": metrics, "machine": machine}
    if method not in ("ngram", "draft_model"):
        line["drafter"] = method
    if method == "mtp":
        llm.collective_rpc("take_draft_logits")
        wish = vllm.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        llm.generate({"prompt_token_ids": list(ALONE)}, wish)
        [logits] = llm.collective_rpc("take_draft_logits")
        line["draft_logits"] = [[round(x, 5) for x in row] for row in logits]
    return line


# ---------------------------------------------------------------------- on any machine


def run_mini(
    entry: Mapping[str, Any], draft: Path, name: str | None = None
) -> tuple[dict[str, list[int]], list[Any], Any]:
    """The mini engine on the recorded arrivals: texts, drafts planned in each step, its stats.
    `name` is one of `METHODS`, by default the recorded method."""
    config = dict(entry["config"])
    method = config["speculative"]["method"]
    config["max_num_batched_tokens"] += config["max_num_seqs"] if method == "draft_model" else 0
    engine = real_engine.mini_engine(
        config,
        speculative_config=_asked(name or method, draft),
        tensor_parallel_size=RANKS.get(name or method, 1),
    )
    planned: list[dict[str, list[int]]] = []

    def note(plan: SchedulerOutput) -> None:
        planned.append({r: [*tokens] for r, tokens in plan.spec_token_ids.items()})

    engine.observers.append(note)
    texts = real_engine.run_on_arrivals(engine, entry)
    return texts, planned, engine.feature("spec_decode").stats


def mini_draft_logits() -> np.ndarray:
    """[num_drafts, vocab_size] of the mini engine, float32, for the prompt that is served alone, as
    long as it lives; the real engine drafts once more for a request that has just ended."""
    engine = LLMEngine(speculative_config=_asked("mtp", MODULE))
    module, k = engine.feature("spec_decode").proposer.module, engine.feature("spec_decode").k
    rows: list[np.ndarray] = []
    forward = module.forward

    def noting(batch: Any) -> np.ndarray:
        rows.append(logits := forward(batch))
        return logits

    module.forward = noting
    engine.generate([list(ALONE)], SamplingParams(max_tokens=12, ignore_eos=True))
    return np.concatenate(rows[: len(rows) // k * k])


def compare(found: Mapping[str, Any], draft: Path) -> tuple[list[str], str]:
    """What differs, in words, and a line that says what was compared."""
    entry = found["recording"]
    wrong = []
    num_steps, difference = replay.replay(entry)
    if difference is not None:
        wrong.append(f"scheduler: {difference}")
    texts, planned, stats = run_mini(entry, draft, found.get("drafter"))
    for name, tokens in entry["outputs"].items():
        if texts.get(name) != tokens:
            wrong.append(f"text of {name}: recorded {tokens}, mini {texts.get(name)}")
    recorded = [step["scheduled_spec_decode_tokens"] for step in entry["steps"]]
    unread: set[str] = set()
    forgiven = 0
    for index, (theirs, ours) in enumerate(zip(recorded, planned, strict=False)):
        apart = {name for name in theirs.keys() | ours if theirs.get(name) != ours.get(name)}
        forgiven += len(apart & unread)
        if apart - unread:
            wrong.append(f"drafts of step {index}: recorded {theirs}, mini {ours}")
            break
        unread |= {name for name, tokens in theirs.items() if not any(tokens)}
    if forgiven > MOST_FORGIVEN:
        wrong.append(f"{forgiven} drafts differ of requests that the drafter had not read whole")
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
    if forgiven:
        line += f" (and the drafts of {forgiven} request-steps behind what the drafter never read)"
    if "draft_logits" in found:
        ours = mini_draft_logits()
        theirs = np.array(found["draft_logits"])[: len(ours)]
        most = float(np.abs(theirs - ours).max())
        if most > TOLERANCE:
            wrong.append(f"draft logits: at most {most:.1e} apart")
        line += f"; logits of {len(ours)} drafts, at most {most:.1e} apart"
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
