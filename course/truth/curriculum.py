"""The table of phases in README: titles and goals from here, links and counts from the folders.

Run `python -m course.truth.curriculum` to write it. Promises: a phase counts as written when its
guide exists, and has its labs counted before that; what is only planned is folded; nothing in the
table is typed that can be counted.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from course.learning import manifest

ROOT = Path(__file__).resolve().parents[2]
PHASES = (
    ("Foundations", "what a language model computes, the KV cache, prefill and decode"),
    ("Architecture and request lifecycle", "one request from prompt to text"),
    ("PagedAttention", "KV memory in blocks: tables, sharing, eviction, kernels"),
    ("The scheduler", "continuous batching, chunked prefill, prefix caching, preemption"),
    ("Attention backends", "online softmax, split keys, MLA, and how a backend is chosen"),
    ("CUDA graphs and torch.compile", "launch overhead, capture and replay, dispatch, passes"),
    ("Quantization", "int8, int4, fp8, GPTQ, AWQ, and what they cost in quality"),
    ("GEMM and MoE kernels", "tiles, grouped products, routers"),
    ("Speculative decoding", "n-gram, draft models, EAGLE, verification"),
    ("Sampling and decoding", "penalties, logits processors, parallel sampling, beam search"),
    ("Distributed inference", "tensor, pipeline, data, expert and context parallelism"),
    ("Multi-LoRA", "many adapters in one batch"),
    ("Structured outputs", "grammars, bitmasks"),
    ("Multimodal", "encoders, placeholders, caches"),
    ("Model architectures", "adding a model, hybrid caches"),
    ("Disaggregated serving", "prefill and decode apart, KV connectors"),
    ("Serving APIs", "servers, tool and reasoning parsers"),
    ("Hardware backends", "platforms and plugins"),
    ("Performance engineering", "measuring, finding the cliff, removing it"),
    ("Capstone", "a contribution, or a service"),
)
FLAGSHIPS = {2, 3}


def table(root: Path = ROOT) -> str:
    """The table as Markdown, one row per phase; those that are only planned in a fold below it."""
    head = ["| phase | what it is about | labs |", "| --- | --- | --- |"]
    lines, planned = list(head), ["| phase | what it will be about |", "| --- | --- |"]
    for number, (title, goal) in enumerate(PHASES):
        name = f"{number:02d} {title}"
        labs = None
        for folder in root.glob(f"phase-{number:02d}-*"):
            if (folder / "00-guide.md").is_file():
                name = f"[{name}]({folder.name}/00-guide.md)"
                labs = _labs(folder)
            elif (folder / "labs" / "README.md").is_file():
                name = f"[{name}]({folder.name}/labs/README.md)"
                labs = f"{_labs(folder)}, chapters planned"
        if number in FLAGSHIPS:
            name += " ★"
        if labs is not None:
            lines.append(f"| {name} | {goal} | {labs} |")
        else:
            planned.append(f"| {name} | {goal} |")
    if len(planned) == 2:
        return "\n".join(lines)
    count = len(planned) - 2
    summary = f"{count} more {'phase is' if count == 1 else 'phases are'} planned"
    fold = [f"<details><summary>{summary}</summary>", "", *planned, "", "</details>"]
    return "\n".join([*lines, "", *fold] if len(lines) > 2 else fold)


def _labs(phase: Path) -> str:
    tags = Counter(manifest.load(path).tag for path in phase.glob("labs/lab-*/lab.yaml"))
    return ", ".join(f"{tags[tag]} {tag}" for tag in ("CPU-OK", "GPU-OPT", "GPU-REQ") if tags[tag])


def replaced(page: str, root: Path = ROOT) -> str:
    """`page` with the table between its markers written anew.

    Raises:
        ValueError: the page has no `<!-- curriculum -->` ... `<!-- /curriculum -->`.
    """
    pattern = re.compile(r"(<!-- curriculum -->\n).*?(<!-- /curriculum -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError("README.md: no <!-- curriculum --> ... <!-- /curriculum -->")
    return pattern.sub(lambda m: f"{m[1]}\n{table(root)}\n\n{m[2]}", page)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(replaced(readme.read_text(encoding="utf-8")), encoding="utf-8")
