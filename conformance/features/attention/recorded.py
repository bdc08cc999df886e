"""What is recorded of attention."""

from conformance.features import cases

PARTS = {
    "paged_attention": cases(
        "attention", "paged_attention",
        "`vllm/v1/attention/backends/cpu_attn.py:292` `CPUAttentionBackendImpl.forward`: the CPU "
        "build's kernel over a paged cache",
        "`paged_attention`, lab 02-06", needs="engine",
    ),
    "attention_selector": cases(
        "attention", "attention_selector",
        "`vllm/platforms/cuda.py:258` `CudaPlatformBase.get_valid_backends` on simulated devices",
        "`test_selector.py`, lab 04-02",
    ),
}  # fmt: skip
