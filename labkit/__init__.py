"""What several labs' tests and scripts share, so that it stands once.

Labs may import this package, `mini_vllm` and `conformance`, and never another lab. Nothing here is
part of a lesson: a learner need not read it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_vllm.models.transformer import Transformer

__all__ = ["load_module", "refused", "same", "shipped_model"]


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


def load_module(path: Path | str, name: str | None = None) -> ModuleType:
    """Run a Python file by its path, under a module name of its own.

    Args:
        path: the file; its folder is not put on the path, so it can import no neighbour.
        name: default: from the folder's and the file's name, so that two labs never meet.
    """
    path = Path(path)
    name = name or f"_lab_{path.parent.name}_{path.stem}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@functools.cache
def shipped_model(dtype: str = "float32") -> Transformer:
    """`byte-llama`, loaded once for all tests of a process."""
    from mini_vllm.models.loader import load_checkpoint
    from mini_vllm.models.transformer import Transformer

    checkpoint = load_checkpoint("byte-llama")
    return Transformer(checkpoint.config, checkpoint.weights, dtype)
