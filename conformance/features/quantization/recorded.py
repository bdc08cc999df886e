"""What is recorded of packed weights."""

from conformance.features import cases

PARTS = {
    "quantization_layouts": cases(
        "quantization", "quantization_layouts",
        "packers of 4-bit weights (GPTQ, AWQ, compressed-tensors), AWQ's repacking and reference "
        "quantizers",
        "`test_quantization.py`, lab 06-03",
    ),
}  # fmt: skip
