"""What is recorded of the way from logits to tokens."""

from conformance.features import cases, run

PARTS = {
    "sampling_masks": cases(
        "sampling", "sampling_masks",
        "`vllm/v1/sample/ops/topk_topp_sampler.py:328` `apply_top_k_top_p_pytorch`, "
        "`vllm/v1/sample/logits_processor/builtin.py:22` `MinPLogitsProcessor`",
        "the sampler's three masks",
    ),
    "sampler": cases(
        "sampling", "sampler",
        "`vllm/v1/sample/sampler.py:67` `Sampler.forward`, stage by stage: edits, temperature and "
        "masks, probabilities, token, logprobs",
        "`test_sampler.py`, lab 09-01",
    ),
    "logprob_token_ids": cases(
        "sampling", "logprob_token_ids",
        "`vllm/v1/sample/sampler.py:146` `Sampler.gather_specific_token_logprobs`, as the front "
        "end says it, for requests alone and beside others",
        "`test_logprob_token_ids.py`",
    ),
    "thinking_budget": cases(
        "sampling", "thinking_budget",
        "`vllm/v1/sample/thinking_budget_state.py:33` `ThinkingBudgetStateHolder` in the real "
        "batch and sampler: which tokens are forced, and the rows that they come from",
        "`test_thinking_budget.py`",
    ),
    "sampling_edges": cases(
        "sampling", "sampling_edges",
        "`vllm/sampling_params.py:168` `SamplingParams`, what it accepts",
        "`SamplingParams`, refusals and all",
    ),
    **{
        f"invariance-{dtype}": run(
            f"invariance-{dtype}", "features.sampling.invariance:recorded",
            "100 prompts alone and together: whose greedy text changes, and at which gap",
            "`invariance.py`", dtype=dtype,
        )
        for dtype in ("float32", "bfloat16")
    },
    "seeds": run(
        "seeds", "seeds:recorded",
        "a seeded request alone, beside others, and in two chunks", "`test_sampling.py`",
    ),
    "texts-sampling": run(
        "texts-sampling", "features.sampling.texts:recorded",
        "100 requests with every knob of `SamplingParams`, their logprobs, and beam searches",
        "`texts sampling`",
    ),
}  # fmt: skip
