"""What is recorded of plans ahead of their tokens; `async` itself is recorded beside the core's."""

from conformance.features import Part

PARTS = {
    "async_plans": Part(
        "parts/async_plans.jsonl.gz", "features.async_scheduling.plans:cases",
        "`vllm/v1/core/sched/async_scheduler.py:12` `AsyncScheduler`",
        "what a plan ahead of the tokens costs",
    ),
}  # fmt: skip
