"""What speculation brought: drafts, accepted, per position.

Promises: the denominators of the real engine: a draft is a request's step with at least one draft
token, the mean acceptance length counts the target's own token, tokens behind a stop count as
accepted. Mirrors `vllm/v1/spec_decode/metrics.py:18` `SpecDecodingStats`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpecDecodingStats:
    """Counters since the engine was made."""

    num_spec_tokens: int
    """Most drafts of a request in a step, k."""
    num_drafts: int = 0
    """Request-steps with at least one draft token, D."""
    num_draft_tokens: int = 0
    """N."""
    num_accepted_tokens: int = 0
    """A."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """[k] how often the draft at each position was kept."""

    def __post_init__(self) -> None:
        if not self.num_accepted_tokens_per_pos:
            self.num_accepted_tokens_per_pos = [0] * self.num_spec_tokens

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one request's step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """1 + A/D: tokens per verification, the target's own included; NaN before the first."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """A/N; NaN before the first draft."""
        drafted = self.num_draft_tokens
        return self.num_accepted_tokens / drafted if drafted else float("nan")

    @property
    def acceptance_rates_per_pos(self) -> list[float]:
        """[k] share of the D drafts whose token at each position was kept; no entry before one."""
        return [n / self.num_drafts for n in self.num_accepted_tokens_per_pos if self.num_drafts]

    def log_line(self, seconds: float) -> str:
        """The real engine's log line, for an interval of `seconds`.

        `vllm/v1/spec_decode/metrics.py:74` `SpecDecodingLogging.log`, which says nothing, as this
        says "", when nothing was drafted.
        """
        if not self.num_drafts:
            return ""
        per_second = 1 / seconds if seconds > 0 else 0.0
        rates = ", ".join(f"{rate:.3f}" for rate in self.acceptance_rates_per_pos)
        return (
            "SpecDecoding metrics: "
            f"Mean acceptance length: {self.mean_acceptance_length:.2f}, "
            f"Accepted throughput: {self.num_accepted_tokens * per_second:.2f} tokens/s, "
            f"Drafted throughput: {self.num_draft_tokens * per_second:.2f} tokens/s, "
            f"Accepted: {self.num_accepted_tokens} tokens, "
            f"Drafted: {self.num_draft_tokens} tokens, "
            f"Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {self.acceptance_rate * 100:.1f}%"
        )
