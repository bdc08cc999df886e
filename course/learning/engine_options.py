"""What a command asks of the engine: its arguments, and which of a learner's parts rest for them.

Promises: `run`, `trace`, `bench` and `serve` say an adapter, ranks or graphs in the same words and
give the engine the same arguments; a part that the engine would refuse beside them rests, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from course.learning.labs import CourseError, Lab

if TYPE_CHECKING:
    from mini_vllm.lora.request import LoRARequest

IN_THE_RANKS = (
    "attention", "linear", "experts", "drafter", "verifier", "adapter_slots", "adapter_delta",
)  # fmt: skip
"""Parts that would have to work in the processes of the ranks: `BASE_MODEL_ONLY` and `PARTS_INSIDE`
of `mini_vllm/distributed/executor.py`."""


OTHER_CACHES = ("byte-sees", "byte-window", "byte-state")
"""Shipped models whose layers keep more than K and V of tokens: no drafts, and block tables that no
lab's cache manager keeps."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options that several commands have."""

    model: str = "byte-llama"
    adapter: str | None = None
    """The name of a shipped one, or a folder in PEFT's layout."""
    tensor_parallel_size: int = 1
    cudagraph_mode: str | None = None
    drafts: int = 0
    """N-gram drafts per step."""
    regex: str | None = None

    @property
    def may_draft(self) -> bool:
        """Whether drafts go with the rest."""
        alone = self.tensor_parallel_size == 1 and self.cudagraph_mode is None
        return alone and self.model not in OTHER_CACHES

    def arguments(self) -> dict[str, Any]:
        """Of `LLM`, but for the model and the parts."""
        found: dict[str, Any] = {}
        if self.drafts:
            found["speculative_config"] = {
                "method": "ngram", "num_speculative_tokens": self.drafts,
                "prompt_lookup_min": 2, "prompt_lookup_max": 5,
            }  # fmt: skip
        if self.adapter is not None:
            found["enable_lora"] = True
        if self.tensor_parallel_size != 1:
            found["tensor_parallel_size"] = self.tensor_parallel_size
        if self.cudagraph_mode is not None:
            found["compilation_config"] = {"cudagraph_mode": self.cudagraph_mode}
        return found

    def lora_request(self) -> LoRARequest | None:
        """For the adapter.

        Raises:
            CourseError: neither a shipped one nor a folder has its name.
        """
        return None if self.adapter is None else adapter_request(self.adapter)

    def rest(
        self, supplied: dict[str, Any], owners: Mapping[str, Lab] = MappingProxyType({})
    ) -> list[str]:
        """Take parts out of `supplied` that do not go with these options; what to say of it."""
        told = []

        def rests(part: str, why: str) -> None:
            if supplied.pop(part, None):
                whose = f" from lab {owners[part].id}" if part in owners else ""
                told.append(f"Your {part}{whose} {why} yours runs.")

        gated = "--regex" if self.regex is not None else "--adapter" if self.adapter else ""
        if self.model in ("byte-sees", "byte-state"):
            gated = gated or f"--model {self.model}"
        if self.drafts:
            rests("scheduler", "cannot plan drafts, so the engine's own runs; with --drafts 0")
            rests("step", "takes one token a row, so the engine's own runs; with --drafts 0")
        elif gated:
            rests("scheduler", f"has no parameter gates, so the engine's own runs; without {gated}")
        if self.model in OTHER_CACHES:
            rests(
                "kv_cache_manager",
                f"does not fit this model, so the engine's own runs; without --model {self.model}",
            )
        if self.model == "byte-window" and not hasattr(
            supplied.get("attention"), "takes_sliding_window"
        ):
            rests(
                "attention",
                "does not apply sliding windows, so the engine's own runs; without --model "
                "byte-window",
            )
        inside = IN_THE_RANKS if self.tensor_parallel_size > 1 else ()
        if resting := [part for part in inside if supplied.pop(part, None)]:
            told.append(
                f"The ranks use the engine's own parts in place of yours: {', '.join(resting)}."
            )
        return told


def adapter_request(name: str) -> LoRARequest:
    """The request for a shipped adapter, or for a folder.

    Raises:
        CourseError: there is neither.
    """
    from mini_vllm.lora.request import LoRARequest

    shipped = shipped_adapters()
    folder = shipped.get(name, Path(name))
    if not folder.is_dir() or not name:
        known = ", ".join(shipped)
        raise CourseError(f"--adapter {name!r}: need {known}, or a folder in PEFT's layout")
    return LoRARequest(folder.name, 1, str(folder))


def shipped_adapters() -> dict[str, Path]:
    """Their folders by name."""
    from mini_vllm.models.loader import MODELS

    found = sorted((MODELS / "adapters").glob("*/adapter_config.json"))
    return {path.parent.name: path.parent for path in found}
