"""What is recorded of the scheduler and what it stands on."""

from conformance.features import Part, cases, workloads
from conformance.workloads import PROFILES

PARTS = {
    **{
        profile: Part(
            f"{profile}.jsonl.gz", "features.core.recorder:profile",
            "`vllm/v1/core/sched/scheduler.py:64` `Scheduler`, this profile of `workloads.py`",
            "`replay`", "workloads", "scheduler", options={"name": profile}, takes_seeds=True,
        )
        for profile in PROFILES
    },
    "async": workloads(
        "core", "async", "asynchronous",
        "`vllm/v1/core/sched/async_scheduler.py:12` `AsyncScheduler`, two batches in the queue",
        "`replay`, lab 01-03",
    ),
    "hazard": Part(
        "hazard/priority.jsonl.gz", "hazard:recorded",
        "the smallest stale read under the priority policy", "lab 03-07", "workloads", "scheduler",
    ),
    "block_hashing": cases(
        "core", "block_hashing",
        "`vllm/v1/core/kv_cache_utils.py:637` `get_request_block_hasher`",
        "`hash_block_tokens`; LoRA and salt keys against the rule",
    ),
    "free_queue": cases(
        "core", "free_queue", "`vllm/v1/core/kv_cache_utils.py:164` `FreeKVCacheBlockQueue`",
        "`FreeKVCacheBlockQueue`",
    ),
    "block_pool": cases(
        "core", "block_pool", "`vllm/v1/core/block_pool.py:130` `BlockPool`", "`BlockPool`"
    ),
    "kv_cache_manager": cases(
        "core", "kv_cache_manager", "`vllm/v1/core/kv_cache_manager.py:110` `KVCacheManager`",
        "`KVCacheManager`",
    ),
    "meters": cases(
        "core", "meters",
        "`vllm/v1/metrics/stats.py:171` `SchedulerStats` and "
        "`vllm/v1/metrics/stats.py:325` `IterationStats` of the scheduler, step by step",
        "lab 03-03",
    ),
    "check_stop": cases(
        "core", "check_stop", "`vllm/v1/core/sched/utils.py:94` `check_stop`",
        "`Request.maybe_finish`",
    ),
    "repetition": cases(
        "core", "repetition",
        "`vllm/v1/core/sched/utils.py:28` `check_sequence_repetition`, as `check_stop` calls it",
        "`test_repetition.py`",
    ),
    "block_sizes": cases(
        "core", "block_sizes",
        "`vllm/v1/core/kv_cache_utils.py:571` `resolve_kv_cache_block_sizes`",
        "the rule in `test_parts.py`",
    ),
    "kv_capacity": cases(
        "core", "kv_capacity",
        "`vllm/v1/core/kv_cache_utils.py:935` `get_num_blocks`, "
        "`vllm/v1/core/kv_cache_utils.py:877` `get_max_concurrency_for_kv_cache_config`",
        "the arithmetic in `test_parts.py`",
    ),
}  # fmt: skip
