"""Record what the pinned Triton kernels give of adapters of embedding and head, interpreted.

Needs the pinned tree on `PYTHONPATH` and triton, no GPU. A process of its own has Triton run the
kernels of `PunicaWrapperGPU` one program at a time on a processor; they take 16 bits alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from conformance.features.lora import lora_embeddings

ABOUT = f"As `lora_embeddings`, with `dtype`, float16: {lora_embeddings.ABOUT}"


def cases() -> Iterator[dict[str, Any]]:
    """The cases; the same every time."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "conformance.features.lora.lora_kernels"]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=500, check=True
    )
    for line in done.stdout.splitlines():
        if line.startswith('{"kind"'):  # the rest is the tree's log
            yield json.loads(line)


def main() -> None:
    """Print a case in each line."""
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    with (
        lora_embeddings.on_a_processor(PunicaWrapperGPU),
        mock.patch.object(lora_shrink_op, "supports_pdl", return_value=False),
        mock.patch.object(lora_expand_op, "supports_pdl", return_value=False),
    ):
        for case in (lora_embeddings.made("llama", 0), *lora_embeddings.faults()):
            print(json.dumps(lora_embeddings.completed(case | {"dtype": "float16"})))


if __name__ == "__main__":
    main()
