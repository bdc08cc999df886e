"""What a replay says about a difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance import recording


def context(entry: recording.Recording, index: int, event: Mapping[str, Any]) -> str:
    """What stood before a step that differs: the configuration, the events, the step before."""
    config = ", ".join(f"{key}={value}" for key, value in entry["config"].items())
    lines = [f"  config    {config}"]
    lines += [
        f"  event     add {add['request_id']}: {len(add['prompt_token_ids'])} prompt tokens, "
        f"max_tokens {add['max_tokens']}, priority {add['priority']}"
        for add in event.get("add", ())
    ]
    lines += [f"  event     abort {request_id}" for request_id in event.get("abort", ())]
    if index > 0:
        before = entry["steps"][index - 1]
        lines.append(
            f"  step {index - 1:<4} running {before['running']}, waiting {before['waiting']}, "
            f"{before['free_blocks']} free blocks"
        )
        lines.append(f"            computed {show(before['num_computed_tokens'])}")
    return "\n".join(lines)


def show(value: Any, width: int = 400) -> str:
    """A value as text, cut where it is long."""
    text = str(value)
    return text if len(text) <= width else f"{text[:width]} ... ({len(text)} characters)"
