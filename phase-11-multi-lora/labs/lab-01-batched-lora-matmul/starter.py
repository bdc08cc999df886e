"""Lab 11-01: one base product for everybody, two thin products for each adapter.

An adapter changes a weight W [out, in] by adding s B A, with A [r, in] and B [out, r]. A batch
mixes rows of several adapters and of the base. What holds throughout:

- D1: a row gets what its own adapter gives it, however the rows are mixed; a base row gets x W^T.
- D2: W is read once per batch, and A and B of an adapter once.
- D3: B A is never built, and no weight is copied for a row.
- D4: nobody's array is changed; what is returned is new.

Sources: `vllm/lora/layers/base_linear.py:195` `BaseLinearLayerWithLoRA._apply_sync`,
`vllm/lora/ops/triton_ops/lora_kernel_metadata.py:109` `LoRAKernelMeta.prepare_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

BASE = -1
"""The id of rows without an adapter."""

Pair = tuple[np.ndarray, np.ndarray]
"""A [r, in] and B [out, r] of one adapter."""


def lora_delta(x: np.ndarray, A: np.ndarray, B: np.ndarray, scaling: float = 1.0) -> np.ndarray:
    """What an adapter adds to the output of a layer: s B A x, row by row (D3).

    A trace: x [[1, 2, 3]], A [[1, 1, 1]], B [[1], [2]], scaling 0.5 give [[3, 6]].

    Args:
        x: [n, in].
        A: [r, in].
        B: [out, r].
        scaling: alpha / r, for example.

    Returns:
        [n, out], in the dtype of x.
    """
    raise NotImplementedError


def apply_single(
    x: np.ndarray, W: np.ndarray, A: np.ndarray, B: np.ndarray, scaling: float
) -> np.ndarray:
    """A layer with one adapter for all rows: what W + s B A would give.

    Args:
        x: [n, in].
        W: [out, in].
        A, B, scaling: as above.

    Returns:
        [n, out].
    """
    raise NotImplementedError


def sort_by_adapter(
    adapter_ids: Sequence[int] | np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bring the rows of each adapter together: what a kernel needs to know of a batch.

    A trace: [0, 0, -1, 1, 1, 0] gives rows [2, 0, 1, 5, 3, 4], ids [-1, 0, 1], counts [1, 3, 2],
    starts [0, 1, 4, 6].

    Returns:
        Rows in their new order [n], each group in the order of the batch; the ids that occur,
        ascending [g]; how many rows each has [g]; and where each group begins, then n [g + 1].
    """
    raise NotImplementedError


def apply_batched(
    x: np.ndarray,
    W: np.ndarray,
    adapters: Mapping[int, Pair | None] | Sequence[Pair | None],
    adapter_ids: Sequence[int] | np.ndarray,
    scalings: Mapping[int, float] | Sequence[float],
) -> np.ndarray:
    """A layer under mixed rows (D1 to D4): row i has the adapter `adapters[adapter_ids[i]]`.

    A trace: W [[1, 0, 0], [0, 1, 0]]; x [[1, 2, 3], [1, 0, -1], [2, 1, 0]]; adapter 1 as in
    `lora_delta`; adapter 2: A [[1, 0, 0]], B [[-1], [1]], scaling 2; ids [1, -1, 2] give
    [[4, 8], [1, 0], [-2, 5]].

    Args:
        x: [n, in], n may be 0.
        W: [out, in].
        adapters: by id, ranks may differ; None leaves the base's output as it is.
        adapter_ids: n ids, `BASE` for none.
        scalings: by id, of every adapter that is used.

    Returns:
        [n, out]: one product with W, and two for each adapter that occurs.

    Raises:
        ValueError: not n ids, an id below -1, or one that `adapters` or `scalings` lacks.
    """
    raise NotImplementedError
