"""Which pictures are equal: a hash of what the encoder will see.

Promises: pictures that differ in a pixel or in their shape have different hashes; equal pixels have
equal ones, whether they came as an array or from a file. Mirrors
`vllm/multimodal/hasher.py:50` `MultiModalHasher`.
"""

from __future__ import annotations

import hashlib

import numpy as np


def hash_picture(pixels: np.ndarray) -> str:
    """The identifier of a picture uint8 [height, width, 3].

    Mode and shape are part of it: two rows of one pixel and one row of two hold the same bytes, and
    before 0.9.0 they were one picture (17378).
    """
    assert pixels.dtype == np.uint8 and pixels.ndim == 3
    found = hashlib.sha256(f"RGB {pixels.shape[0]} {pixels.shape[1]}:".encode())
    found.update(np.ascontiguousarray(pixels).data)
    return found.hexdigest()
