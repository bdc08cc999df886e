"""Record which layers each pipeline stage gets of the real v0.22.1."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

Case = dict[str, Any]

ABOUT = (
    '`{"num_layers", "stages", "partition", "ranges"}`. `partition`: the text of '
    "VLLM_PP_LAYER_PARTITION, or None. `ranges`: [first, one after the last] of every stage, or "
    '`error`: "ValueError".'
)

WRITTEN = [
    (20, 4, "4,6,6,4"), (20, 4, "5,5,5,5"), (20, 4, "1,17,1,1"), (20, 4, "4,6,6"),
    (20, 4, "4,6,6,5"), (20, 4, "4,6,6,4,0"), (20, 4, "20,0,0,0"), (20, 4, "4, 6, 6, 4"),
    (20, 4, "four,6,6,4"), (20, 4, ""), (20, 4, "4,6,6,4,"), (3, 1, "3"), (3, 1, "2"),
]  # fmt: skip


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    import vllm.envs as envs
    from vllm.distributed.utils import get_pp_indices

    grid: list[tuple[int, int, str | None]] = [
        (layers, stages, None) for stages in range(1, 17) for layers in range(1, 41)
    ]
    grid += [(layers, stages, None) for layers in (48, 61, 80, 126) for stages in (2, 3, 4, 8, 16)]
    rng = random.Random(10)
    written: list[tuple[int, int, str | None]] = [*WRITTEN]
    for _ in range(40):
        parts = [rng.randint(1, 9) for _ in range(rng.randint(2, 6))]
        wrong = rng.choice((0, 0, 0, 1))
        written.append((sum(parts) + wrong, len(parts), ",".join(map(str, parts))))
    for layers, stages, partition in [*grid, *written]:
        case: Case = {"num_layers": layers, "stages": stages, "partition": partition}
        with patch.object(envs, "VLLM_PP_LAYER_PARTITION", partition, create=True):
            try:
                found = [list(get_pp_indices(layers, rank, stages)) for rank in range(stages)]
                yield case | {"ranges": found}
            except ValueError as error:
                yield case | {"error": type(error).__name__}
