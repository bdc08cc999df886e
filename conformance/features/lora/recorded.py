"""What is recorded of adapters."""

from conformance.features import cases, run, workloads

PARTS = {
    "lora": workloads("lora", "lora", "record", "the same `Scheduler` with adapters, few slots"),
    "adapter_slots": cases(
        "lora", "adapter_slots",
        "`vllm/lora/worker_manager.py:258` `LRUCacheWorkerLoRAManager._apply_adapters`, 30 steps",
        "`AdapterSlotCache`, `Adapters`",
    ),
    "lora_embeddings": cases(
        "lora", "lora_embeddings",
        "`vllm/lora/layers/vocal_parallel_embedding.py:96` "
        "`VocabParallelEmbeddingWithLoRA.forward` and "
        "`vllm/lora/layers/logits_processor.py:141` `LogitsProcessorWithLoRA._get_logits`, mixed "
        "batches under the real manager",
        "`test_embeddings.py`",
    ),
    "lora_kernels": cases(
        "lora", "lora_kernels",
        "the same through the kernels of `vllm/lora/punica_wrapper/punica_gpu.py:33` "
        "`PunicaWrapperGPU`, float16, interpreted",
        "`test_embeddings.py`",
    ),
    "lora_quantized": cases(
        "lora", "lora_quantized",
        "`vllm/lora/layers/base_linear.py:195` `BaseLinearLayerWithLoRA._apply_sync` over a layer "
        "of block-scaled FP8, mixed batches under the real manager",
        "`test_quantized.py`",
    ),
    "lora_experts": cases(
        "lora", "lora_experts",
        "`vllm/lora/layers/fused_moe.py:27` `FusedMoEWithLoRA` under the real manager, deltas by "
        "`vllm/lora/punica_wrapper/punica_gpu.py:491` `PunicaWrapperGPU.add_lora_w13` and its "
        "neighbour, interpreted", "`test_experts.py`",
    ),
    "lora_shards": cases(
        "lora", "lora_shards",
        "`vllm/lora/layers/column_parallel_linear.py:251` "
        "`MergedColumnParallelLinearWithLoRA.slice_lora_b` and its neighbours, rank by rank",
        "`test_ranks.py`",
    ),
    "lora_gathered": cases(
        "lora", "lora_gathered",
        "`vllm/lora/layers/column_parallel_linear.py:24` `_mcp_apply` on two ranks with all of A, "
        "kernels interpreted", "`test_ranks.py`",
    ),
    "grids": cases(
        "lora", "grids",
        "`vllm/lora/ops/triton_ops/lora_shrink_op.py:132` `_lora_shrink` and "
        "`vllm/model_executor/layers/fused_moe/fused_moe.py:709` "
        "`invoke_fused_moe_triton_kernel`: the grids they launch",
        "lab 11-01",
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
    "lora-faults": run(
        "lora-faults", "features.lora.faults:recorded",
        "requests that end an engine with adapters: an id behind the vocabulary, logprobs of two "
        "prompts", "`test_lora.py`",
    ),
    **{
        f"steps-lora-{name}": run(
            f"steps-lora-{name}", "features.lora.steps:recorded",
            f"vLLM whole with four adapters and two slots, greedy: {what}", "`steps`", run=name,
        )
        for name, what in (
            ("one", "one rank"), ("tp2", "two tensor ranks, nothing gathered where A is whole"),
            ("tp2-sharded", "two tensor ranks, A and B both cut"),
        )
    },
    "lora-faults-tp2": run(
        "lora-faults-tp2", "features.lora.faults:recorded",
        "a request that ends an engine with adapters on two tensor ranks", "`test_lora.py`",
        ranks=True,
    ),
    "texts-lora-tp2": run(
        "texts-lora-tp2", "features.lora.texts:recorded",
        "greedy texts of the base and three adapters in one batch on two tensor ranks, a slot to "
        "spare", "`texts lora`", max_loras=4, ranks=2,
    ),
    "texts-lora-moe": run(
        "texts-lora-moe", "features.lora.moe_texts:recorded",
        "greedy texts of the model of experts and three adapters of its router and attention in "
        "one batch, a slot to spare", "`test_experts.py`",
    ),
    "texts-lora-ends": run(
        "texts-lora-ends", "features.lora.texts:recorded",
        "greedy texts of the base and three adapters of embedding and head in one batch, a slot to "
        "spare", "`texts lora`", max_loras=4, ends=True,
    ),
}  # fmt: skip
