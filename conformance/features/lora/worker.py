"""Loaded by vLLM's worker process where adapters run on a processor: `worker_extension_cls`.

At the pin metadata of adapters are put into pinned memory whenever torch was built for CUDA, also
where there is no driver: `vllm/utils/torch_utils.py:615` `async_tensor_h2d`. The default is bound
when the function is defined, so it is changed there.
"""

from __future__ import annotations

from vllm.utils import torch_utils

torch_utils.async_tensor_h2d.__defaults__ = (False,)


class NoPinning:
    """Adds no method: that this module is imported is all."""
