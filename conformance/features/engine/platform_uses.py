"""How the pin asks its platform: by what it can do, or by which one it is, counted from source.

    python -m conformance.features.engine.platform_uses

Every `current_platform.NAME` of the pinned tree, by the folder below `vllm/` that holds it; a name
that begins with `is_` and a device's name asks which platform it is. Needs `upstream/`.
"""

from __future__ import annotations

import ast
import collections
import json
import sys

from conformance import recording
from conformance.features.engine.platform_defaults import LAB
from conformance.real_core.places import tree_of

KEPT = LAB / "recordings" / "uses.json"
WHICH = (
    "is_cuda", "is_rocm", "is_cpu", "is_xpu", "is_tpu", "is_cuda_alike", "is_zen_cpu",
    "is_out_of_tree", "is_unspecified",
)  # fmt: skip


def uses(text: str) -> list[str]:
    """The names that a module reads off `current_platform`, in order."""
    return [
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "current_platform"
    ]


def counted() -> dict[str, dict[str, int]]:
    """By folder: uses, and those among them that ask which platform it is."""
    root = tree_of("0.22.1") / "vllm"
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        folder = "/".join(parts[:2] if parts[0] == "v1" else parts[:1])
        for name in uses(path.read_text(encoding="utf-8")):
            found[folder if len(parts) > 1 else "vllm"]["uses"] += 1
            found[folder if len(parts) > 1 else "vllm"]["which"] += name in WHICH
    for folder in ("v1/core", "v1/sample"):
        found[folder]["uses"] += 0
    return {folder: {"uses": c["uses"], "which": c["which"]} for folder, c in sorted(found.items())}


def main() -> int:
    told = {"upstream": recording.UPSTREAM, "folders": counted()}
    KEPT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
