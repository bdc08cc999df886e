"""`course trace`: every engine step as a table row and as JSON.

The JSON holds the configuration, the prompts and one record per step
(`mini_vllm.observe.trace.StepRecord`). Promises: the same command gives the same file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from course import terminal
from course.files import write_atomically
from course.learning.labs import CourseError
from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.observe.trace import StepRecord, traced_steps
from mini_vllm.request import Request


def collect(
    prompts: list[str], max_tokens: int, ignore_eos: bool, options: dict[str, Any],
    parts: EngineParts | None = None, lora_request: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Run `prompts` together to the end: `{"config", "requests", "steps"}`, JSON types only.

    Requests are called A, B, C ... in prompt order, whatever ran before in this process.

    Raises:
        CourseError: the engine refuses an option or a prompt.
    """
    try:
        engine = LLMEngine(**options, parts=parts)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        try:
            ids = [
                engine.add_request(
                    prompt, params, request_id=name_of(number), lora_request=lora_request
                )
                for number, prompt in enumerate(prompts)
            ]
            requests = {request_id: engine.requests[request_id] for request_id in ids}
            steps = [record.to_json() for record in traced_steps(engine)]
        finally:
            engine.close()
    except ValueError as error:
        raise CourseError(str(error)) from None
    return {
        "config": {**options, "max_tokens": max_tokens, "ignore_eos": ignore_eos},
        "requests": [
            {
                "request_id": request_id,
                "prompt": prompt,
                "prompt_token_ids": list(requests[request_id].prompt_token_ids),
                "output_token_ids": list(requests[request_id].output_token_ids),
                "text": _text(engine, requests[request_id]),
                "finish_reason": requests[request_id].finish_reason,
            }
            for request_id, prompt in zip(ids, prompts, strict=True)
        ],
        "steps": steps,
    }


def _text(engine: LLMEngine, request: Request) -> str:
    """What a request said, by the engine's detokenizer."""
    detokenizer = engine.parts.detokenizer(engine.tokenizer)
    detokenizer.update(request.text_token_ids)
    return detokenizer.text


def name_of(number: int) -> str:
    """A, B, ..., Z, then R26, R27, ..."""
    return chr(ord("A") + number) if number < 26 else f"R{number}"


def show(console: Console, data: dict[str, Any], save: Path | None = None) -> None:
    """Print what `collect` gave, and save it if a file is named."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("step", "scheduled", "total", "running", "waiting", "free", "events"):
        table.add_column(name, justify="right" if name in ("step", "total", "free") else "left")
    for step in data["steps"]:
        record = StepRecord(**step)
        table.add_row(
            str(record.step),
            record.scheduled_text(),
            str(sum(record.num_scheduled_tokens.values())),
            " ".join(record.running) or "-",
            " ".join(record.waiting) or "-",
            str(record.free_blocks),
            record.events_text(),
        )
    console.print(table)
    for request in data["requests"]:
        terminal.say(
            console,
            f"{request['request_id']} {request['prompt']!r} -> {request['text']!r} "
            f"({request['finish_reason']})",
        )
    told = "A:n is tokens scheduled, +nc tokens taken from the prefix cache."
    if save is not None:
        write_atomically(save, json.dumps(data, indent=1) + "\n")
        told += f" Saved: {save}"
    terminal.say(console, told)
