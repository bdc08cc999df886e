"""What `speculative_config` may say.

Promises: vLLM's keys and defaults; a key or a value that is unknown, or that the real engine has
and this one has not, is refused by name. Mirrors `vllm/config/speculative.py:74`
`SpeculativeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from mini_vllm.batch import Model
from mini_vllm.config import whole

METHODS = ("ngram", "ngram_gpu", "draft_model", "mtp")
ASYNC_METHODS = ("ngram_gpu", "draft_model", "mtp")
"""`vllm/config/vllm.py:825` `VllmConfig.__post_init__` refuses the others."""
WITH_WEIGHTS = ("draft_model", "mtp")
"""Methods that load a model and keep K and V of their own."""
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
MAX_SPEC_LEN = 128
"""Most drafts of a request in a step: `vllm/v1/sample/rejection_sampler.py:34` `MAX_SPEC_LEN`."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Who drafts, and how many tokens."""

    num_speculative_tokens: int
    """Drafts per request and step, k."""
    method: str | None = None
    """"ngram", "ngram_gpu" (the same drafts, allowed with `async_scheduling`), "draft_model" or
    "mtp"; by default what `model` asks for."""
    model: str | Path | Model | None = None
    """The draft model: whatever `LLM(model=...)` takes, with the target's vocabulary. For "mtp" the
    folder of a module, such as `models/byte-mtp`."""
    max_model_len: int | None = None
    """The drafter's own context; default its model's, or the target's if that is shorter. While a
    sequence of the step comes within k of it, no drafts are made."""
    prompt_lookup_min: int | None = None
    """Shortest n-gram looked for; default `prompt_lookup_max`, or 5."""
    prompt_lookup_max: int | None = None
    """Longest n-gram looked for; default `prompt_lookup_min`, or 5."""
    draft_sample_method: str = "greedy"
    """"greedy": the draft model's argmax, verified as if it were certain; "probabilistic": a sample
    at the request's temperature, verified with the law it was drawn from."""

    def __post_init__(self) -> None:
        whole("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPEC_LEN)
        object.__setattr__(self, "method", self._method())
        if self.draft_sample_method not in DRAFT_SAMPLE_METHODS:
            need = ", ".join(DRAFT_SAMPLE_METHODS)
            raise ValueError(
                f"draft_sample_method={self.draft_sample_method!r}: need one of {need}"
            )
        if self.max_model_len is not None:
            whole("max_model_len", self.max_model_len, 2)
        if self.method in WITH_WEIGHTS:
            self._check_draft_model()
        else:
            self._set_lookup()

    @classmethod
    def of(cls, given: Mapping[str, Any] | Self) -> Self:
        """From the dict that vLLM takes.

        Raises:
            ValueError: not a mapping, a key missing or unknown, or a value out of range.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config={given!r}: need a dict, or None")
        names = [field.name for field in fields(cls)]
        for key in given:
            if key not in names:
                raise ValueError(
                    f"speculative_config: {key!r} is not supported; there are {', '.join(names)}"
                )
        if "num_speculative_tokens" not in given:
            raise ValueError(
                "speculative_config: num_speculative_tokens is missing; need 1 or more"
            )
        return cls(**given)

    def _method(self) -> str:
        """The method asked for, or the one that `model` asks for."""
        method = self.method
        if method is None and self.model is not None:
            method = str(self.model) if self.model in ("ngram", "ngram_gpu") else "draft_model"
        if method not in METHODS:
            raise ValueError(f"method={self.method!r}: need one of {', '.join(METHODS)}")
        return str(method)

    def _check_draft_model(self) -> None:
        if self.model is None:
            raise ValueError(f"model=None: method {self.method} needs a draft model")
        if self.method == "mtp" and not isinstance(self.model, str | Path):
            raise ValueError(f"model={self.model!r}: method mtp needs the folder of a module")
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)!r}: only for method ngram")

    def _set_lookup(self) -> None:
        if self.model not in (None, "ngram", "ngram_gpu"):
            raise ValueError(f"model={self.model!r}: method {self.method} has no model")
        if self.draft_sample_method != "greedy":
            raise ValueError(
                f"draft_sample_method={self.draft_sample_method!r}: only for method draft_model or "
                "mtp"
            )
        if self.max_model_len is not None:
            raise ValueError(
                f"max_model_len={self.max_model_len}: only for method draft_model or mtp"
            )
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None and high is None:
            low = high = 5
        low, high = high if low is None else low, low if high is None else high
        object.__setattr__(self, "prompt_lookup_min", whole("prompt_lookup_min", low, 1))
        object.__setattr__(self, "prompt_lookup_max", whole("prompt_lookup_max", high, 1))
        if self.lookup[0] > self.lookup[1]:
            raise ValueError(f"prompt_lookup_min={low}: need at most prompt_lookup_max={high}")

    @property
    def lookup(self) -> tuple[int, int]:
        """(shortest, longest) n-gram looked for."""
        return self.prompt_lookup_min or 0, self.prompt_lookup_max or 0

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots beyond the scheduled tokens: for the draft model's own K and V."""
        return self.num_speculative_tokens if self.method in WITH_WEIGHTS else 0

    @property
    def use_eagle(self) -> bool:
        """Whether the drafter reads the target's hidden states, so that a prefix hit loses its last
        block: `vllm/config/speculative.py:1059` `SpeculativeConfig.use_eagle`."""
        return self.method == "mtp"

    def max_model_len_of(self, longest: int | None, limit: int | None) -> int | None:
        """The drafter's context, from its model's and the target's:
        `vllm/config/speculative.py:845` `SpeculativeConfig._maybe_override_draft_max_model_len`.

        Raises:
            ValueError: more was asked for than either has.
        """
        bounds = [bound for bound in (longest, limit) if bound is not None]
        shortest = min(bounds, default=None)
        if self.max_model_len is None:
            return shortest
        if shortest is not None and self.max_model_len > shortest:
            raise ValueError(
                f"speculative_config: max_model_len={self.max_model_len}: need at most {shortest}, "
                "what the draft model and the target support"
            )
        return self.max_model_len
