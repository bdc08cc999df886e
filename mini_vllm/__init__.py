"""A numpy engine that makes the scheduling and KV-cache decisions of vLLM v0.22.1."""

from mini_vllm.block_pool import (
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    hash_block_tokens,
)
from mini_vllm.cudagraph import (
    GraphEntry,
    GraphRunner,
    LaunchCounter,
    PiecewiseGraphRunner,
    run_eager,
)
from mini_vllm.engine import EngineParts, LLMEngine
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.llm import LLM, CompletionOutput, RequestOutput
from mini_vllm.model import ToyModel
from mini_vllm.request import Request, RequestStatus
from mini_vllm.sampler import Sampler, SamplingParams
from mini_vllm.scheduler import Scheduler, SchedulerOutput
from mini_vllm.tokenizer import ByteTokenizer

__all__ = [
    "LLM",
    "BlockPool",
    "ByteTokenizer",
    "CompletionOutput",
    "EngineParts",
    "FreeKVCacheBlockQueue",
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
    "SchedulerOutput",
    "ToyModel",
    "hash_block_tokens",
    "run_eager",
]
