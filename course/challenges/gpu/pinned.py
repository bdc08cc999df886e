"""vLLM's own Triton kernels, from the pinned tree, with torch and Triton and nothing else.

The modules that a kernel's file imports are given as far as it uses them: the enum of KV formats
comes from the pinned file too, the platform is CUDA. `fused_moe.py` imports half of vLLM, so of
that file the functions themselves are taken.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import importlib.util
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

OPS = Path("vllm/v1/attention/ops")
EXPERTS = Path("vllm/model_executor/layers/fused_moe")


def functions(file: Path, names: Sequence[str]) -> str:
    """The source of some definitions of a file, in the file's order, decorators included.

    Raises:
        LookupError: the file does not define one of them.
    """
    text = file.read_text(encoding="utf-8")
    found = {
        node.name: node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    if missing := [name for name in names if name not in found]:
        raise LookupError(f"{file} does not define {', '.join(missing)}")
    lines = text.splitlines()
    parts = []
    for node in sorted((found[name] for name in names), key=lambda node: node.lineno):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    return "\n\n\n".join(parts) + "\n"


def _module(name: str, file: Path) -> ModuleType:
    """Run a file as a module: Triton reads a kernel's source from the file it stands in."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


@contextlib.contextmanager
def _standing_in(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Put modules in the place of vLLM's own, and whatever was there back."""
    ours = {name: sys.modules.get(name) for name in list(sys.modules) if name.startswith("vllm")}
    for name in ours:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith("vllm")]:
            del sys.modules[name]
        sys.modules.update({name: old for name, old in ours.items() if old is not None})


def _made(name: str, **values: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(values)
    return made


def unified_attention(tree: Path) -> Callable[..., Any]:
    """`vllm/v1/attention/ops/triton_unified_attention.py` `unified_attention` of a tree."""
    import torch
    import triton
    import triton.language as tl

    kinds: dict[str, Any] = {"IntEnum": enum.IntEnum}
    exec(functions(tree / "vllm/v1/kv_cache_interface.py", ["KVQuantMode"]), kinds)
    platform = SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)
    packages = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops")
    stand_ins = {name: _made(name, __path__=[]) for name in packages} | {
        "vllm.envs": _made("vllm.envs", VLLM_BATCH_INVARIANT=False),
        "vllm.logger": _made("vllm.logger", init_logger=logging.getLogger),
        "vllm.platforms": _made("vllm.platforms", current_platform=platform),
        "vllm.triton_utils": _made("vllm.triton_utils", tl=tl, triton=triton),
        "vllm.v1.kv_cache_interface": _made(
            "vllm.v1.kv_cache_interface", KVQuantMode=kinds["KVQuantMode"]
        ),
    }
    stand_ins["vllm"].envs = stand_ins["vllm.envs"]  # type: ignore[attr-defined]
    with _standing_in(stand_ins):
        for name in ("triton_attention_helpers", "triton_unified_attention"):
            made = _module(f"vllm.v1.attention.ops.{name}", tree / OPS / f"{name}.py")
    found: Callable[..., Any] = made.unified_attention
    return found


@functools.cache
def fused_moe_kernel(tree: Path) -> Any:
    """`vllm/model_executor/layers/fused_moe/fused_moe.py` `fused_moe_kernel` of a tree."""
    text = functions(tree / EXPERTS / "fused_moe.py", ["write_zeros_to_output", "fused_moe_kernel"])
    file = Path(_folder().name) / "pinned_fused_moe.py"
    file.write_text("import triton\nimport triton.language as tl\n\n\n" + text, encoding="utf-8")
    return _module("pinned_fused_moe", file).fused_moe_kernel


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Holds what Triton reads a kernel's source from; gone when the process ends."""
    return tempfile.TemporaryDirectory(prefix="pinned-")


def table(tree: Path, experts: int, width: int, card: str) -> dict[int, dict[str, int]]:
    """The tuned tiles that the tree has for a card, by number of tokens; empty without a table.

    Source: `vllm/model_executor/layers/fused_moe/fused_moe.py:1001` `get_config_file_name`.
    """
    name = card.replace(" ", "_")
    name = "NVIDIA_H200" if "H200" in name.split("_") else name
    file = tree / EXPERTS / "configs" / f"E={experts},N={width},device_name={name}.json"
    if not file.is_file():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    return {int(tokens): tile for tokens, tile in found.items() if tokens.isdigit()}


def default_tile(tree: Path, tokens: int, experts: int, width: int, k: int, top_k: int) -> Any:
    """What `get_default_config` of the tree says for bfloat16 where no table is."""
    names: dict[str, Any] = {
        "Any": Any,
        "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False),
        "current_platform": SimpleNamespace(is_rocm=lambda: False),
    }
    exec(functions(tree / EXPERTS / "fused_moe.py", ["get_default_config"]), names)
    return names["get_default_config"](tokens, experts, width, k, top_k, None)


def tile_of(
    tree: Path, tokens: int, experts: int, width: int, k: int, top_k: int, card: str
) -> dict[str, int]:
    """The tile vLLM takes: of the table's nearest number of tokens, else the default rule's.

    Source: `vllm/model_executor/layers/fused_moe/fused_moe.py:1305` `try_get_optimal_moe_config`.
    """
    tuned = table(tree, experts, width, card)
    if tuned:
        found = tuned[min(tuned, key=lambda each: abs(each - tokens))]
    else:
        found = default_tile(tree, tokens, experts, width, k, top_k)
    return {name: value for name, value in found.items() if name != "SPLIT_K"}
