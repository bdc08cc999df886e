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

__all__ = ["moe_model", "refused", "same", "shipped_model"]


def same(got: object, expected: object, why: str) -> None:
    """Assert equality; the message says why it matters, what was expected, and what came."""
    assert got == expected, f"{why}\nexpected {expected}\ncame     {got}"


def refused(call: Callable[[], Any], what: str) -> None:
    """Assert that `call` raises a ValueError; another error or a result is one line."""
    try:
        got = repr(call())
    except ValueError:
        return
    except Exception as error:
        got = repr(error)
    raise AssertionError(f"{what} must raise ValueError; came {got}")


@functools.cache
def shipped_model() -> Transformer:
    """`byte-llama`, loaded once for all tests of a process.

    In float64: the shape of a batch then changes no token, and outputs may be compared.
    """
    from mini_vllm.models.loader import load_checkpoint
    from mini_vllm.models.transformer import Transformer

    checkpoint = load_checkpoint("byte-llama")
    return Transformer(checkpoint.config, checkpoint.weights, "float64")


@functools.cache
def _moe_checkpoint() -> Any:
    """`byte-moe`, read once."""
    from mini_vllm.models.loader import load_checkpoint

    return load_checkpoint("byte-moe")


def moe_model() -> Transformer:
    """A model with experts, a new one each time, so that a test may change its layers; float64."""
    from mini_vllm.models.transformer import Transformer

    checkpoint = _moe_checkpoint()
    return Transformer(checkpoint.config, checkpoint.weights, "float64")
