"""What several labs' tests and scripts share, so that it stands once.

Labs may import this package, `mini_vllm` and `conformance`, and never another lab. Nothing here is
part of a lesson: a learner need not read it. Importing it needs the standard library only, so that
`processes` works in whichever environment a `run.py` is started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_vllm.models.transformer import Transformer

__all__ = ["refused", "same", "shipped_model"]


def same(got: object, expected: object, why: str) -> None:
    """Assert equality, and say what was expected and why it matters."""
    assert got == expected, f"expected {expected!r}, got {got!r}: {why}"


def refused(call: Callable[[], Any], named: str, why: str = "") -> None:
    """Assert that `call` raises a ValueError whose text holds `named`."""
    try:
        got = call()
    except ValueError as error:
        assert named in str(error), (
            f"the ValueError must name {named!r}, so that one knows what to mend; it says {error}"
        )
        return
    raise AssertionError(f"expected a ValueError that names {named!r}, got {got!r}. {why}".rstrip())


@functools.cache
def shipped_model(dtype: str = "float32") -> Transformer:
    """`byte-llama`, loaded once for all tests of a process."""
    from mini_vllm.models.loader import load_checkpoint
    from mini_vllm.models.transformer import Transformer

    checkpoint = load_checkpoint("byte-llama")
    return Transformer(checkpoint.config, checkpoint.weights, dtype)
