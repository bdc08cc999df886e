"""What is recorded of experts."""

from conformance.features import Part, cases, run

PARTS = {
    "moe": Part(
        "parts/moe.jsonl.gz", "features.moe.recorder:cases",
        "routing, the aligned blocks' reference, placement of experts, and the load balancer's "
        "packing, copies and slots",
        "`test_moe.py`, labs 07-01 and 07-04",
    ),
    "expert_backends": cases(
        "moe", "expert_backends",
        "which backend each oracle chooses for experts, for 5 simulated GPUs, 4 kinds of "
        "checkpoint and 8 deployments",
        "`test_moe.py`",
    ),
    "block_fp8": cases(
        "moe", "block_fp8",
        "block-scaled FP8 by the reference code of the kernels' tests: codes, scales, and the 4 "
        "layers of experts of byte-moe",
        "`test_block_fp8.py`",
    ),
    "fp8_checkpoint": cases(
        "moe", "fp8_checkpoint",
        "checkpoints in block-scaled FP8 as vLLM's loader takes them: parameters and logits of 5, "
        "what it says of 8 mistakes, which modules it skips",
        "`test_fp8_checkpoint.py`",
    ),
    **{
        f"texts-{name}": run(
            f"texts-{name}", "features.moe.texts:recorded",
            f"greedy texts of 100 prompts, a model with experts: {name}", "`texts moe`", name=name,
        )
        for name in ("qwen3-moe", "mixtral", "byte-moe")
    },
}  # fmt: skip
