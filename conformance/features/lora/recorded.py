"""What is recorded of adapters."""

from conformance.features import cases, run, workloads

PARTS = {
    "lora": workloads("lora", "lora", "record", "the same `Scheduler` with adapters, few slots"),
    "adapter_slots": cases(
        "lora", "adapter_slots",
        "`vllm/lora/worker_manager.py:258` `LRUCacheWorkerLoRAManager._apply_adapters`, 30 steps",
        "`AdapterSlotCache`, `Adapters`",
    ),
    **{
        f"texts-lora{suffix}": run(
            f"texts-lora{suffix}", "features.lora.texts:recorded",
            f"greedy texts of the base and three adapters in one batch, {what}", "`texts lora`",
            max_loras=max_loras,
        )
        for suffix, what, max_loras in (
            ("", "a slot to spare", 4), ("-full", "every slot taken", 3),
        )
    },
}  # fmt: skip
