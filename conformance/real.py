"""The real v0.22.1 scheduler on a CPU: one attention group, no model, scripted tokens.

Everything here needs the pinned tree on `PYTHONPATH` and the packages of
`requirements-upstream.txt`. Only `recorders/`, the live test and the benchmark
import it.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from conformance import recording

__all__ = [
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "Request",
    "SamplingParams",
    "abort",
    "draft_token_ids",
    "get_request_block_hasher",
    "init_none_hash",
    "make_request",
    "make_scheduler",
    "model_config",
    "runner_output",
    "sha256",
    "upstream",
]

logging.disable(logging.WARNING)

upstream = recording.UPSTREAM
"""What a recording made here says it was made from; a later release puts its own name there."""

OPT_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "ffn_dim": 64,
    "max_position_embeddings": 65536,
    "word_embed_proj_dim": 64,
}


@functools.cache
def model_config() -> ModelConfig:
    """A config no weights stand behind: the scheduler reads only lengths from it."""
    init_none_hash(sha256)
    folder = Path(tempfile.mkdtemp())  # later releases read it again for every scheduler
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(OPT_CONFIG))
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float16", max_model_len=8
    )


def make_scheduler(config: dict[str, Any], async_scheduling: bool = False) -> Scheduler:
    """The real scheduler for a recording's `config`, over one full-attention group.

    Args:
        config: the keys of ARCHITECTURE's recordings (`num_blocks`, `block_size`, ...).
        async_scheduling: build `AsyncScheduler`, which plans ahead of the sampled tokens.
    """
    shared = model_config()
    shared.max_model_len = config["max_model_len"]
    cache_config = CacheConfig(
        block_size=config["block_size"], enable_prefix_caching=config["enable_prefix_caching"]
    )
    cache_config.num_gpu_blocks = config["num_blocks"]
    drafts = _speculative_config(config, shared)
    # A draft model takes one slot per sequence off the budget again.
    extra = config["max_num_seqs"] if drafts and drafts.uses_draft_model() else 0
    vllm_config = VllmConfig(
        model_config=shared,
        cache_config=cache_config,
        device_config=DeviceConfig(device="cpu"),
        scheduler_config=SchedulerConfig(
            max_model_len=config["max_model_len"],
            is_encoder_decoder=False,
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"] + extra,
            enable_chunked_prefill=config["enable_chunked_prefill"],
            policy=config["policy"],
            disable_chunked_mm_input=config.get("disable_chunked_mm_input", False),
            async_scheduling=async_scheduling,
        ),
        speculative_config=drafts,
        lora_config=LoRAConfig(max_loras=config["max_loras"]) if "max_loras" in config else None,
    )
    # Later releases refuse a threshold above `max_model_len` at construction; it has no effect.
    vllm_config.scheduler_config.long_prefill_token_threshold = config[
        "long_prefill_token_threshold"
    ]
    one = {"kind": "full", "block_size": config["block_size"]}
    groups = config.get("kv_groups", [one])
    for mode in {group["mode"] for group in groups if "mode" in group}:
        vllm_config.cache_config.mamba_cache_mode = mode
    scheduler = (AsyncScheduler if async_scheduling else Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=config["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{index}"], _spec(group))
                for index, group in enumerate(groups)
            ],
        ),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=config["block_size"],
        hash_block_size=math.gcd(*(group["block_size"] for group in groups)),
    )
    if "encoder_cache_size" in config:  # the stand-in model takes no pictures: set directly
        scheduler.max_num_encoder_input_tokens = config["encoder_compute_budget"]
        scheduler.encoder_cache_manager = EncoderCacheManager(config["encoder_cache_size"])
    _assert_as_asked(scheduler, config)
    return scheduler


def _spec(group: Mapping[str, Any]) -> FullAttentionSpec | SlidingWindowSpec | MambaSpec:
    """What one group of `config.kv_groups` keeps."""
    told = {
        "block_size": group["block_size"], "num_kv_heads": 1, "head_size": 1,
        "dtype": torch.float32,
    }  # fmt: skip
    if group["kind"] == "full":
        return FullAttentionSpec(**told)
    if group["kind"] == "mamba":
        return MambaSpec(
            block_size=group["block_size"], shapes=((1,),), dtypes=(torch.float32,),
            mamba_cache_mode=group.get("mode", "all"),
        )  # fmt: skip
    return SlidingWindowSpec(**told, sliding_window=group["sliding_window"])


def _picture(item: Mapping[str, Any]) -> MultiModalFeatureSpec:
    """One entry of a recording's `add.mm`, without its data."""
    mask = torch.tensor(item["is_embed"], dtype=torch.bool) if "is_embed" in item else None
    place = PlaceholderRange(item["offset"], item["length"], mask)
    return MultiModalFeatureSpec(None, "image", item["hash"], place, item["hash"])


def _speculative_config(config: dict[str, Any], target: ModelConfig) -> SpeculativeConfig | None:
    """The drafter of a recording's `config`, without weights: the scheduler asks for its method."""
    if "speculative" not in config:
        return None
    made = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=config["speculative"]["num_speculative_tokens"],
        target_model_config=target,
        target_parallel_config=ParallelConfig(),
    )
    made.method = config["speculative"]["method"]
    return made


def _assert_as_asked(scheduler: Scheduler, config: dict[str, Any]) -> None:
    """The config classes adjust some values on the way; a recording must not lie about them."""
    used = scheduler.scheduler_config
    assert scheduler.max_model_len == config["max_model_len"]
    assert scheduler.max_num_running_reqs == config["max_num_seqs"]
    assert scheduler.max_num_scheduled_tokens == config["max_num_batched_tokens"]
    assert used.long_prefill_token_threshold == config["long_prefill_token_threshold"]
    assert used.enable_chunked_prefill == config["enable_chunked_prefill"]
    assert scheduler.cache_config.enable_prefix_caching == config["enable_prefix_caching"]
    assert scheduler.kv_cache_manager.enable_caching == config["enable_prefix_caching"]
    assert scheduler.scheduler_reserve_full_isl
    if "max_loras" in config:
        assert scheduler.lora_config.max_loras == config["max_loras"]
    if "speculative" in config:
        assert scheduler.num_spec_tokens == config["speculative"]["num_speculative_tokens"]


def make_request(
    add: dict[str, Any], block_size: int, eos_token_id: int, num_hash_lookahead_tokens: int = 0
) -> Request:
    """The real request for one entry of a recording's `events[...].add`.

    `num_hash_lookahead_tokens` is that of the scheduler it goes to (0.33.0 and newer).
    """
    ahead = (num_hash_lookahead_tokens,) if num_hash_lookahead_tokens else ()
    asked = StructuredOutputsParams(regex="scripted") if add.get("grammar") else None
    params = SamplingParams(
        temperature=0.0, max_tokens=add["max_tokens"], ignore_eos=add["ignore_eos"],
        structured_outputs=asked,
    )  # fmt: skip
    params.update_from_generation_config({}, eos_token_id)
    return Request(
        request_id=add["request_id"],
        prompt_token_ids=add["prompt_token_ids"],
        sampling_params=params,
        pooling_params=None,
        mm_features=[_picture(item) for item in add.get("mm", ())],
        arrival_time=add["arrival_time"],
        priority=add["priority"],
        lora_request=lora_request(add.get("lora", 0)),
        block_hasher=get_request_block_hasher(block_size, sha256, *ahead),
    )


def lora_request(adapter_id: int) -> LoRARequest | None:
    """The adapter of a recording's `add.lora`; 0 is the base model."""
    return LoRARequest(f"lora{adapter_id}", adapter_id, "none") if adapter_id else None


def runner_output(
    plan: SchedulerOutput, sampled: Mapping[str, int] | Mapping[str, list[int]]
) -> ModelRunnerOutput:
    """What a model runner would hand back: one token or several of each row that samples."""
    tokens = {r: [said] if isinstance(said, int) else list(said) for r, said in sampled.items()}
    req_ids = list(plan.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[tokens.get(r, []) for r in req_ids],
    )


def draft_token_ids(drafts: Mapping[str, list[int]]) -> DraftTokenIds:
    """What a model runner hands over after the step, for `Scheduler.update_draft_token_ids`."""
    return DraftTokenIds(list(drafts), [list(tokens) for tokens in drafts.values()])


def abort(scheduler: Scheduler, request_id: str) -> None:
    """End a request from outside. One at a time: upstream walks several in set order."""
    scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
