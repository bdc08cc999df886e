"""What the pin makes of dtype "auto" on a platform, from its own function.

`vllm/config/model.py:2003` `_resolve_auto_dtype` is taken out of the pinned source and run alone:
dtypes are their names, the platform is what a case says, and every model may have every dtype.
`python -m conformance.features.engine.auto_dtype` writes the recording of lab 17-01; it needs
`upstream/` (`course upstream fetch`).
"""

from __future__ import annotations

import ast
import gzip
import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from conformance.features import ROOT
from conformance.real_core.places import tree_of

LAB = ROOT / "phase-17-hardware-backends-and-plugins" / "labs" / "lab-01-platform-abstraction"
KEPT = LAB / "recordings" / "auto_dtype.jsonl.gz"
DTYPES = ("bfloat16", "float16", "float32")


def cases() -> Iterator[dict[str, Any]]:
    """Every order of every set of supported dtypes, every checkpoint's dtype, pooling or not."""
    path = tree_of("0.22.1") / "vllm" / "config" / "model.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = "_resolve_auto_dtype"
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == wanted]
    warned: list[Any] = []
    names: dict[str, Any] = {
        "torch": SimpleNamespace(**{name: name for name in DTYPES}, dtype=str),
        "logger": SimpleNamespace(warning=lambda *told: warned.append(told)),
        "_is_valid_dtype": lambda model_type, dtype: True,
    }
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    for count in (1, 2, 3):
        for supported in itertools.permutations(DTYPES, count):
            names["current_platform"] = SimpleNamespace(
                supported_dtypes=list(supported), get_device_name=lambda: "device",
                get_device_capability=lambda: None,
            )  # fmt: skip
            for dtype, pooling in itertools.product(DTYPES, (False, True)):
                warned.clear()
                came = names[wanted]("llama", dtype, is_pooling_model=pooling)
                yield {
                    "supported": supported, "dtype": dtype, "pooling": pooling,
                    "came": came, "warned": bool(warned),
                }  # fmt: skip


if __name__ == "__main__":
    with gzip.GzipFile(KEPT, "wb", mtime=0) as file:
        for case in cases():
            file.write(json.dumps(case, separators=(",", ":")).encode() + b"\n")
