"""Lab 04-03 as the engine's attention: same tokens with chunks, cached prefixes, preemption.

The part is found as `course run --mine` finds it, from the solution.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from course.files import load_module
from course.learning import mine
from course.learning.labs import find_labs
from labkit import shipped_model
from labkit.mine import PassedCourse
from mini_vllm import EngineParts, LLMEngine, SamplingParams

PHASE = Path(__file__).resolve().parent
ROOT = PHASE.parent
PROMPTS = [
    "The block table of a request maps its positions to blocks",
    "The block table of a request maps its blocks to memory",
    "A step holds",
    "The block table of a request is read by the kernel",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 12, "block_size": 8},
    "cached": {"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 64},
    "cramped": {"num_blocks": 22, "block_size": 4, "max_num_batched_tokens": 20},
    "cramped, uncached": {
        "num_blocks": 22,
        "block_size": 4,
        "max_num_batched_tokens": 20,
        "enable_prefix_caching": False,
    },
}


@cache
def lab_attention() -> Any:
    labs = [lab for lab in find_labs(ROOT) if lab.folder.is_relative_to(PHASE)]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert owners["attention"].id == "04-03"
    return parts["attention"]


def run(
    parts: EngineParts, sampling: SamplingParams, **settings: Any
) -> tuple[list[list[int]], list[np.ndarray], dict[str, int]]:
    """Tokens, the logits of every step, and what the run had in it."""
    engine = LLMEngine(model=shipped_model(), parts=parts, **settings)
    counts = {"chunks": 0, "cached": 0, "preempted": 0, "mixed": 0}
    logits: list[np.ndarray] = []

    def note(plan: Any) -> None:
        lengths = list(plan.num_scheduled_tokens.values())
        counts["cached"] += sum(plan.num_cached_tokens.values())
        counts["preempted"] += len(plan.preempted_req_ids)
        counts["mixed"] += 1 in lengths and max(lengths) > 1
        for request in plan.scheduled_requests:
            new = plan.num_scheduled_tokens[request.request_id]
            counts["chunks"] += new > 1 and request.num_computed_tokens + new < request.num_tokens

    execute = engine.runner.execute

    def watch(plan: Any) -> np.ndarray:
        logits.append(np.array(execute(plan)))
        return logits[-1]

    engine.observers.append(note)
    engine.runner.execute = watch  # type: ignore[method-assign]
    requests = []
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, sampling, request_id=f"r{number}")
        requests.append(engine.requests[f"r{number}"])
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    return [list(request.output_token_ids) for request in requests], logits, counts


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_engine_says_the_same_with_the_labs_attention(name):
    settings = SETTINGS[name]
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    tokens, logits, counts = run(EngineParts(), greedy, **settings)
    own_tokens, own_logits, own_counts = run(
        EngineParts(attention=lab_attention()), greedy, **settings
    )
    assert own_tokens == tokens
    assert own_counts == counts
    worst = max(np.abs(a - b).max() for a, b in zip(own_logits, logits, strict=True))
    assert worst < 1e-9, "logits"
    if name == "chunked":
        assert counts["chunks"] >= 8 and counts["mixed"] >= 4
    if name == "cached":
        assert counts["cached"] >= 40
    if name.startswith("cramped"):
        assert counts["preempted"] >= 1
    if name == "cramped, uncached":
        assert counts["cached"] == 0


@pytest.mark.slow
def test_sampled_tokens_are_the_same_too():
    sampling = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
    settings = SETTINGS["cramped"]
    tokens, _, _ = run(EngineParts(), sampling, **settings)
    own_tokens, _, _ = run(EngineParts(attention=lab_attention()), sampling, **settings)
    assert own_tokens == tokens
    assert tokens[0] != run(EngineParts(), SamplingParams(max_tokens=12), **settings)[0][0]


@pytest.mark.slow
def test_it_works_beside_the_other_labs_parts():
    """Allocator, manager, scheduler and attention of four labs, one engine."""
    wanted = ("02-01", "02-05", "02-06", "03-01", "04-03")
    labs = [lab for lab in find_labs(ROOT) if lab.id in wanted]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert {part: lab.id for part, lab in owners.items()} == {
        "block_pool": "02-01",
        "kv_cache_manager": "02-05",
        "scheduler": "03-01",
        "attention": "04-03",
    }, "the later lab supplies the attention"
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    tokens, _, counts = run(EngineParts(), greedy, **SETTINGS["cramped"])
    own_tokens, _, own_counts = run(EngineParts(**parts), greedy, **SETTINGS["cramped"])
    assert (own_tokens, own_counts) == (tokens, counts)


@pytest.mark.slow
def test_course_run_mine_uses_it(tmp_path, monkeypatch, capsys):
    """A course with both attention labs passed: the later one runs."""
    course = PassedCourse(tmp_path, ["02-06", "04-03"], monkeypatch, capsys)
    plain, mine_said = course.run(PROMPTS[2]), course.run(PROMPTS[2], "--mine")
    assert "attention          yours, from lab 04-03" in mine_said
    assert plain.splitlines()[0] == mine_said.splitlines()[0]


def test_run_of_lab_02_compares_no_flashinfer_places_where_it_is_not_installed() -> None:
    """The real selector lists FlashInfer only where it is installed."""
    folder = Path(__file__).parent / "labs" / "lab-02-backend-selection"
    run = load_module(folder / "run.py")
    with_it = {
        "name": "FLASH_ATTN",
        "line": "potential backends: ['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN'].",
        "error": "{FLASH_ATTN: [block_size], FLASHINFER: [block_size], FLASHINFER_MLA: [x]}",
    }
    without = {
        "name": "FLASH_ATTN",
        "line": "potential backends: ['FLASH_ATTN', 'TRITON_ATTN'].",
        "error": "{FLASH_ATTN: [block_size], FLASHINFER: [ImportError], FLASHINFER_MLA: [y, z]}",
    }
    assert run.unlisted(with_it) == run.unlisted(without)
    assert run.unlisted(with_it)["error"] == "{FLASH_ATTN: [block_size]}"
