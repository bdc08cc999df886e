"""Record the hashes of full blocks of the real v0.22.1."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"block_size", "requests": [{"token_ids", "lora", "cache_salt"}], "hashes": [[hex]]}`. '
    "One list of hashes per request, one hash per full block. Only equality means anything."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.lora.request import LoRARequest

    from conformance import real

    rng = random.Random(1)
    os.environ["PYTHONHASHSEED"] = "0"  # upstream's root of the chain is random without it
    real.init_none_hash(real.sha256)
    for _ in range(60):
        block_size = rng.choice((1, 2, 4, 16))
        shared = rng.choices(range(3), k=5 * block_size)
        requests, hashes = [], []
        for index in range(8):
            token_ids = shared[: rng.randint(1, len(shared))] + rng.choices(range(3), k=block_size)
            lora, salt = rng.choice((None, None, "a", "b")), rng.choice((None, None, "s", "t"))
            request = real.Request(
                request_id=f"r{index}",
                prompt_token_ids=token_ids,
                sampling_params=real.SamplingParams(max_tokens=1),
                pooling_params=None,
                lora_request=LoRARequest(lora, 1 + (lora == "b"), "none") if lora else None,
                cache_salt=salt,
                block_hasher=real.get_request_block_hasher(block_size, real.sha256),
            )
            requests.append({"token_ids": token_ids, "lora": lora, "cache_salt": salt})
            hashes.append([value.hex()[:24] for value in request.block_hashes])
        yield {"block_size": block_size, "requests": requests, "hashes": hashes}
