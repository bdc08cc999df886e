"""A numpy engine that makes the scheduling and KV-cache decisions of vLLM v0.22.1.

Codes such as B4 or S13 in docstrings are invariants: `INVARIANTS.md` says what each means.
"""

from mini_vllm.async_scheduler import AsyncScheduler
from mini_vllm.block_pool import (
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    hash_block_tokens,
)
from mini_vllm.config import CacheConfig, EngineConfig, SchedulerConfig
from mini_vllm.cudagraph import (
    GraphEntry,
    GraphRunner,
    LaunchCounter,
    PiecewiseGraphRunner,
    run_eager,
)
from mini_vllm.engine import LLMEngine
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.llm import LLM
from mini_vllm.models.toy import ToyModel
from mini_vllm.outputs import CompletionOutput, RequestOutput
from mini_vllm.parts import EngineParts
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request, RequestStatus
from mini_vllm.sampler import Sampler
from mini_vllm.sampling_params import BeamSearchParams, SamplingParams
from mini_vllm.scheduler import Scheduler
from mini_vllm.tokenizer import ByteTokenizer

__all__ = [
    "LLM",
    "AsyncScheduler",
    "BeamSearchParams",
    "BlockPool",
    "ByteTokenizer",
    "CacheConfig",
    "CompletionOutput",
    "EngineConfig",
    "EngineParts",
    "FreeKVCacheBlockQueue",
    "Gate",
    "GraphEntry",
    "GraphRunner",
    "KVCacheBlock",
    "KVCacheManager",
    "LLMEngine",
    "LaunchCounter",
    "PiecewiseGraphRunner",
    "Request",
    "RequestOutput",
    "RequestStatus",
    "Sampler",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "ToyModel",
    "hash_block_tokens",
    "run_eager",
]
