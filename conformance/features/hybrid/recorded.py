"""What is recorded of groups of layers that keep different things."""

from conformance.features import Part, cases, run


def _workloads(name: str, function: str, what: str) -> Part:
    return Part(
        f"{name}.jsonl.gz", f"recorders.hybrid:{function}", what, "`replay`", "workloads",
        "scheduler", takes_seeds=True,
    )  # fmt: skip


PARTS = {
    "hybrid": _workloads(
        "hybrid",
        "record",
        "`vllm/v1/core/kv_cache_coordinator.py:392` `HybridKVCacheCoordinator`, and windows alone",
    ),
    "hybrid_spec": _workloads(
        "hybrid_spec", "record_drafts", "the same with drafts that read hidden states"
    ),
    "states": _workloads(
        "states",
        "record_states",
        '`vllm/v1/core/single_type_kv_cache_manager.py:842` `MambaManager` in mode "all"',
    ),
    "states_align": _workloads("states_align", "record_aligned", 'the same in mode "align"'),
    "kv_sizing": cases(
        "hybrid",
        "kv_sizing",
        "`vllm/v1/core/kv_cache_utils.py:1618` `get_kv_cache_groups` and what follows from it, "
        "for the shapes of published models",
        "`mini_vllm/kv/sizing.py`",
    ),
    "texts-byte-window": run(
        "texts-byte-window",
        "features.hybrid.texts:recorded",
        "greedy texts of 64 prompts, the shipped model with windows",
        "`texts hybrid`",
    ),
}
