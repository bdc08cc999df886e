"""What is recorded of captured graphs."""

from conformance.features import cases

PARTS = {
    "cudagraph_dispatcher": cases(
        "cudagraph", "cudagraph_dispatcher",
        "`vllm/v1/cudagraph_dispatcher.py:15` `CudagraphDispatcher`", "the rule in `test_parts.py`",
    ),
    "cudagraph_modes": cases(
        "cudagraph", "cudagraph_modes",
        "default capture sizes, mode resolution, dispatch of 1 to 600 tokens",
        "the rules in `test_cudagraphs.py`",
    ),
}  # fmt: skip
