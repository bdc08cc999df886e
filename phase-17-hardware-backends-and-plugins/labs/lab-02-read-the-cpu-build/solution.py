"""Lab 17-02: what a platform overrides, how large its cache is, and what its log must say.

Three predictions about a build that you have not started, each from its source or its arithmetic,
then a log of a real start to hold them against.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any

# --- what a class overrides -----------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Of a platform's class, against the interface; every list in the order of its source."""

    overridden: list[str] = field(default_factory=list)
    """Methods and properties that the interface has too."""
    new: list[str] = field(default_factory=list)
    """Those that it has not."""
    attributes: list[str] = field(default_factory=list)
    """Class attributes, annotated or not, that the class itself sets."""
    unimplemented: list[str] = field(default_factory=list)
    """Methods of the interface that raise NotImplementedError there and are not overridden; in the
    order of the interface."""


def overrides(interface: str, platform: str, base: str, name: str) -> Report:
    """Compare two classes by their source text alone.

    Args:
        interface: the source of the module that defines class `base`.
        platform: the source of the module that defines class `name`, a direct subclass.

    A property counts as a method. Functions inside of a method are not methods. A method is
    unimplemented if `raise NotImplementedError`, called or not, is a statement of its own body: not
    under a condition, and not in a nested function.

    Raises:
        ValueError: a source has no class of that name.
    """
    theirs, ours = _class(interface, base), _class(platform, name)
    known, own = _methods(theirs), _methods(ours)
    attributes = []
    for node in ours.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            attributes.append(node.target.id)
        elif isinstance(node, ast.Assign):
            attributes += [each.id for each in node.targets if isinstance(each, ast.Name)]
    return Report(
        [each for each in own if each in known],
        [each for each in own if each not in known],
        attributes,
        [each for each, node in known.items() if each not in own and _raises(node)],
    )


def _class(source: str, name: str) -> ast.ClassDef:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ValueError(f"no class {name!r} in this source")


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {each.name: each for each in node.body if isinstance(each, kinds)}


def _raises(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    for each in node.body:
        if isinstance(each, ast.Raise) and each.exc is not None:
            raised = each.exc.func if isinstance(each.exc, ast.Call) else each.exc
            if isinstance(raised, ast.Name) and raised.id == "NotImplementedError":
                return True
    return False


# --- how large the cache is -----------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A KV cache of one full-attention group."""

    bytes_per_token: int
    num_blocks: int
    num_tokens: int
    concurrency: float
    """Requests of the longest length that fit at once, as the log rounds it."""


def kv_plan(
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
    kv_bytes: int,
    max_model_len: int,
    block_size: int = 128,
) -> Plan:
    """What a budget of memory holds.

    Each token leaves K and V in every layer. A block takes room for its tokens in all of them, and
    the memory holds whole blocks. The concurrency is blocks over the blocks of one longest
    request, to two decimals.

    Example: 24 layers, 2 KV heads of 64, 2 bytes, 4 GiB, 1,024 tokens: 12,288 bytes per token,
    2,730 blocks, 349,440 tokens, 341.25 requests.

    Raises:
        ValueError: a size below 1, or a budget that holds no block.
    """
    sizes = layers, kv_heads, head_dim, dtype_bytes, kv_bytes, max_model_len, block_size
    if min(sizes) < 1:
        raise ValueError(f"sizes={sizes}: need at least 1 each")
    per_token = 2 * layers * kv_heads * head_dim * dtype_bytes
    num_blocks = kv_bytes // (per_token * block_size)
    if num_blocks < 1:
        raise ValueError(f"kv_bytes={kv_bytes}: a block takes {per_token * block_size}")
    longest = -(-max_model_len // block_size)
    return Plan(per_token, num_blocks, num_blocks * block_size, round(num_blocks / longest, 2))


def decode_ceiling(params: int, dtype_bytes: float, bandwidth: float) -> float:
    """Most tokens per second that one sequence can get: every weight is read once per token.

    Args:
        params: weights that a token reads.
        bandwidth: bytes per second.

    Example: 494,032,768 weights of 2 bytes at 50e9 bytes per second: 50.6.

    Raises:
        ValueError: any of the three not above 0.
    """
    if params < 1 or dtype_bytes <= 0 or bandwidth <= 0:
        raise ValueError(f"{params=}, {dtype_bytes=}, {bandwidth=}: need above 0 each")
    return bandwidth / (params * dtype_bytes)


# --- what the log says ----------------------------------------------------------------------------


def read_log(text: str) -> dict[str, Any]:
    """What a start of the CPU build says about itself.

    Lines may stand anywhere, with anything around them; a name whose line is missing is missing.

    Returns:
        "platform": str, of "Automatically detected platform NAME."; "kv_gib": float, the first
        number in "(A/B) GiB for KV cache on node"; "num_tokens": int of "KV cache size: N tokens",
        with its commas; "concurrency": float of "Maximum concurrency for N tokens per request: Cx";
        "max_model_len": that N; "announced_async": bool, whether the first "Asynchronous scheduling
        is enabled" or "... disabled" says enabled; "layout": str of "Using LAYOUT KV cache layout".
    """
    found: dict[str, Any] = {}
    if seen := re.search(r"Automatically detected platform (\w+)\.", text):
        found["platform"] = seen[1]
    if seen := re.search(r"\(([\d.]+)/[\d.]+\) GiB for KV cache on node", text):
        found["kv_gib"] = float(seen[1])
    if seen := re.search(r"KV cache size: ([\d,]+) tokens", text):
        found["num_tokens"] = int(seen[1].replace(",", ""))
    if seen := re.search(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x", text):
        found["max_model_len"] = int(seen[1].replace(",", ""))
        found["concurrency"] = float(seen[2])
    if seen := re.search(r"Asynchronous scheduling is (enabled|disabled)", text):
        found["announced_async"] = seen[1] == "enabled"
    if seen := re.search(r"Using (\w+) KV cache layout", text):
        found["layout"] = seen[1]
    return found
