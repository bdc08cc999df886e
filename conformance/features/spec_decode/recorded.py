"""What is recorded of drafts."""

from conformance.features import cases, run, workloads

PARTS = {
    "spec": workloads(
        "spec_decode", "spec", "record", "the same `Scheduler` with drafts, four methods"
    ),
    "async_spec": workloads(
        "spec_decode", "async_spec", "record_async", "`AsyncScheduler` with drafts"
    ),
    "ngram_proposer": cases(
        "spec_decode", "ngram_proposer",
        "`vllm/v1/spec_decode/ngram_proposer.py:131` `NgramProposer.propose`",
        "`ngram_propose`, lab 08-01", needs="engine",
    ),
    "rejection_sampler": cases(
        "spec_decode", "rejection_sampler",
        "`vllm/v1/sample/rejection_sampler.py:392` `rejection_sample`",
        "`rejection_sample`, lab 08-03", needs="engine",
    ),
    "drafter_memory": cases(
        "spec_decode", "drafter_memory",
        "`vllm/v1/core/kv_cache_utils.py:1236` `get_kv_cache_config_from_groups` with a drafter's "
        "layers", "`test_spec.py`", needs="engine",
    ),
    **{
        f"spec-{method}-float32": run(
            f"spec-{method}-float32", "features.spec_decode.texts:recorded",
            f"vLLM whole with drafts, greedy: {method}", "`texts spec_decode`", method=method,
        )
        for method in ("ngram", "ngram-tp2", "draft_model", "draft_model-tp2", "mtp", "mtp-short")
    },
}  # fmt: skip
