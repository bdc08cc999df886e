"""What a user may turn: the cache, the scheduler, the engine. Frozen, checked once, passed whole.

Promises: every knob is spelled here and nowhere else, a wrong one is a ValueError that names it,
its value and what is accepted. Mirrors `vllm/config/cache.py:42` `CacheConfig` and
`vllm/config/scheduler.py:26` `SchedulerConfig`; one request's knobs are in `sampling_params.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from mini_vllm.checks import flag, number, whole
from mini_vllm.sampling_params import MIN_TEMPERATURE, SamplingParams

__all__ = [
    "MIN_TEMPERATURE", "MOST_BLOCKS", "POLICIES", "CacheConfig", "EngineConfig", "SamplingParams",
    "SchedulerConfig", "number", "whole",
]  # fmt: skip

POLICIES = ("fcfs", "priority")
MAMBA_CACHE_MODES = ("none", "align", "all")
MOST_BLOCKS = 1 << 24
"""Bound on the pool: each block is a Python object, and a typing slip should not eat the memory."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size of the KV cache and whether equal prefixes share it.

    vLLM sizes its cache from free GPU memory; here `num_blocks` says it. Block 0 is the null
    block, so `num_blocks - 1` can be handed out.
    """

    num_blocks: int = 256
    block_size: int = 16
    """Tokens per block."""
    enable_prefix_caching: bool = True
    """Keep full blocks by the hash of their prefix, and look them up."""
    mamba_cache_mode: str = "none"
    """Which states of Mamba layers later requests can find: "all" at the ends of blocks, or with
    "align" those of steps that end there. "none" is "all" with prefix caching; without, all are
    "none". `vllm/config/cache.py:132` `CacheConfig.mamba_cache_mode`"""

    def __post_init__(self) -> None:
        most = f"at least 2 (block 0 is reserved) and at most {MOST_BLOCKS}"
        whole("num_blocks", self.num_blocks, 2, MOST_BLOCKS, most)
        whole("block_size", self.block_size, 1, 1 << 20, need="at least 1 and at most 1048576")
        flag("enable_prefix_caching", self.enable_prefix_caching)
        if self.mamba_cache_mode not in MAMBA_CACHE_MODES:
            modes = ", ".join(MAMBA_CACHE_MODES)
            raise ValueError(f"mamba_cache_mode={self.mamba_cache_mode!r}: need one of {modes}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one step, and the order in which requests are served."""

    max_num_seqs: int | None = None
    """Most requests running at once; None: 128, or the budget if that is smaller."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one request in one step; 0 means without a bound."""
    max_model_len: int | None = None
    """Longest sequence in tokens, prompt included; None means without a bound."""
    policy: str = "fcfs"
    """"fcfs", or "priority": smaller `Request.priority` first, then arrival."""
    enable_chunked_prefill: bool = True
    """When off, a prompt that exceeds the rest of the budget waits."""
    forget_withdrawn_blocks: bool = False
    """Un-index the blocks of a request withdrawn from the step that had just indexed them. Off, as
    upstream, where a later request can then adopt blocks that were never computed."""
    async_scheduling: bool = False
    """Plan a step before the tokens of the step before it are known; see `AsyncScheduler`."""
    num_speculative_tokens: int = 0
    """Drafts per request and step; the drafter and the verifier are the engine's."""
    num_lookahead_tokens: int = 0
    """Slots a running request gets beyond its scheduled tokens, for drafts made in the step."""
    use_eagle: bool = False
    """A prefix hit loses its last block: `vllm/config/speculative.py:1059`
    `SpeculativeConfig.use_eagle`."""

    def __post_init__(self) -> None:
        budget = whole("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_num_seqs is None:
            object.__setattr__(self, "max_num_seqs", min(128, budget))
        need = (
            f"1 to max_num_batched_tokens={budget}, so that every running request can get a token"
        )
        whole("max_num_seqs", self.max_num_seqs, 1, budget, need)
        whole(
            "long_prefill_token_threshold",
            self.long_prefill_token_threshold,
            0,
            need="0 (off) or more",
        )
        whole("num_speculative_tokens", self.num_speculative_tokens, 0)
        whole("num_lookahead_tokens", self.num_lookahead_tokens, 0)
        for name in (
            "enable_chunked_prefill", "forget_withdrawn_blocks", "async_scheduling", "use_eagle",
        ):  # fmt: skip
            flag(name, getattr(self, name))
        if self.max_model_len is not None:
            whole("max_model_len", self.max_model_len, 2, need="at least 2, or None")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: need one of {', '.join(POLICIES)}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from besides the model itself."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dtype: str = "float32"
    """"float32", or "float64" where outputs of different batch shapes are compared."""
    seed: int = 0
    """Seeds requests that sample without a seed of their own, and `ToyModel`."""
    max_logprobs: int = 20
    """Most `logprobs` and `prompt_logprobs` a request may ask for; -1 is the whole vocabulary."""

    def __post_init__(self) -> None:
        whole("seed", self.seed, 0, need="0 or more")
        whole("max_logprobs", self.max_logprobs, -1, need="-1 (the whole vocabulary) or more")
        if getattr(self.dtype, "__name__", str(self.dtype)) not in ("float32", "float64"):
            raise ValueError(f"dtype={self.dtype!r}: need float32 or float64")

    @classmethod
    def of(cls, knobs: Mapping[str, Any]) -> Self:
        """A configuration from flat names, as vLLM's `EngineArgs` takes them.

        `scheduling_policy` is upstream's flat name of `SchedulerConfig.policy`; both are accepted.

        Raises:
            ValueError: an unknown name (the accepted ones are listed), or a value out of range.
        """
        given = dict(knobs)
        if "scheduling_policy" in given:
            given["policy"] = given.pop("scheduling_policy")
        parts: dict[str, dict[str, Any]] = {"cache": {}, "scheduler": {}, "": {}}
        home = {f.name: "cache" for f in fields(CacheConfig)}
        home |= {f.name: "scheduler" for f in fields(SchedulerConfig)}
        home |= {"dtype": "", "seed": "", "max_logprobs": ""}
        for name, value in given.items():
            if name not in home:
                raise ValueError(f"{name}={value!r}: no such argument; there are {', '.join(home)}")
            parts[home[name]][name] = value
        return cls(
            CacheConfig(**parts["cache"]), SchedulerConfig(**parts["scheduler"]), **parts[""]
        )

    def with_max_model_len(self, limit: int | None) -> Self:
        """The same with `max_model_len` bounded by what the model supports.

        Raises:
            ValueError: more was asked for than the model supports.
        """
        length = self.scheduler.max_model_len
        if length is not None and limit is not None and length > limit:
            raise ValueError(f"max_model_len={length}: the model supports {limit}, need no more")
        return replace(self, scheduler=replace(self.scheduler, max_model_len=length or limit))
