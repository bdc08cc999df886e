"""As `worker`, where ranks hold all of A: they do not gather what each of them has already.

At the pin `vllm/lora/layers/column_parallel_linear.py:24` `_mcp_apply` gathers the shrunk rows of
merged linears whether A is cut or not. With A whole, each row comes back as often as there are
ranks: kernels take the first copy, and the form for processors raises
(https://github.com/vllm-project/vllm/issues/45691).
"""

from __future__ import annotations

from vllm.lora.layers import column_parallel_linear

from conformance.features.lora.worker import NoPinning

column_parallel_linear.tensor_model_parallel_all_gather = lambda rows: rows


class NoGather(NoPinning):
    """Adds no method: that this module is imported is all."""
