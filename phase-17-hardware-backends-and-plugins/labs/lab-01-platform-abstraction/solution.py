"""Lab 17-01: one object that answers for the hardware, a registry, and a platform from outside.

An engine asks one `Platform` what depends on the hardware. The proof that this works is a third
platform, registered by somebody else, that changes what an engine plans without a line of the
engine's being edited: `plan_startup` is that engine, and is given.

Four rules are this lab's and not vLLM's: the CPU as a floor, the refusal of a name that is taken,
an override, and float32 as what is left. `README.md` says what vLLM does instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KNOWN_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")


@dataclass(frozen=True)
class Platform:
    """What an engine asks of the hardware."""

    name: str
    device_type: str
    """As the machine lists its devices: "cuda", "cpu"."""
    attention_backend: str
    supported_dtypes: tuple[str, ...]
    """The preferred one first."""
    supports_graphs: bool
    in_tree: bool = False
    """Whether it comes with the engine."""

    def check_dtype(self, requested: str) -> str:
        """The dtype that is served where `requested` was asked for.

        A supported one is served as it is. One of `KNOWN_DTYPES` that is not supported is served as
        "float32", with a `UserWarning` that names both. Example: the CPU serves "float8_e4m3fn" as
        "float32".

        Raises:
            ValueError: `requested` is none of `KNOWN_DTYPES`.
        """
        if requested in self.supported_dtypes:
            return requested
        if requested not in KNOWN_DTYPES:
            raise ValueError(f"dtype={requested!r}: need one of {', '.join(KNOWN_DTYPES)}")
        warnings.warn(
            f"{self.name} does not support {requested}: served as float32",
            UserWarning,
            stacklevel=2,
        )
        return "float32"


def register_platform(registry: dict[str, Platform], platform: Platform) -> None:
    """Put a platform under its name.

    Raises:
        ValueError: the name is taken; the registry stays as it was.
    """
    if platform.name in registry:
        raise ValueError(f"platform {platform.name!r}: the name is taken")
    registry[platform.name] = platform


def make_default_platforms() -> dict[str, Platform]:
    """A new registry of what comes with the engine, by name.

    `cuda`: device "cuda", "flash_attn", bfloat16, float16 and float32, graphs. `cpu`: device "cpu",
    "cpu_attn", the same dtypes, no graphs. Both are in the tree.
    """
    dtypes = ("bfloat16", "float16", "float32")
    registry: dict[str, Platform] = {}
    register_platform(registry, Platform("cuda", "cuda", "flash_attn", dtypes, True, True))
    register_platform(registry, Platform("cpu", "cpu", "cpu_attn", dtypes, False, True))
    return registry


def resolve_platform(
    registry: dict[str, Platform], available_devices: Sequence[str], override: str | None = None
) -> Platform:
    """The platform to serve on.

    Args:
        registry: by name; it holds "cpu".
        available_devices: device types that the machine has, in any order; some may be unknown.
        override: the name of a platform, taken whatever the machine has. It is for bisecting.

    Without an override those platforms are candidates whose device is there and is not a "cpu",
    whatever they are called. One that is not in the tree goes before all that are. With no
    candidate it is the one called "cpu".

    Raises:
        ValueError: an override that is not registered, "" too; the message lists what is.
        RuntimeError: more than one is left, in the tree or not; the message names them.
    """
    if override is not None:
        if override not in registry:
            raise ValueError(f"override={override!r}: need one of {', '.join(sorted(registry))}")
        return registry[override]
    there = [
        platform for platform in registry.values()
        if platform.device_type != "cpu" and platform.device_type in available_devices
    ]  # fmt: skip
    candidates = [platform for platform in there if not platform.in_tree] or there
    if len(candidates) > 1:
        names = ", ".join(sorted(platform.name for platform in candidates))
        raise RuntimeError(f"one platform can be active, and these say that they are: {names}")
    return candidates[0] if candidates else registry["cpu"]


def resolve_auto_dtype(platform: Platform, config_dtype: str, pooling: bool = False) -> str:
    """The dtype of "auto" for a checkpoint's own, as vLLM decides it.

    Source: `vllm/config/model.py:2003` `_resolve_auto_dtype`. The preferred dtype is float16 for a
    pooling model where that is supported, else the first supported one. A float32 checkpoint is
    served in the preferred. A supported dtype is kept. Any other is served in the preferred, with a
    `UserWarning`.
    """
    supported = platform.supported_dtypes
    preferred = "float16" if pooling and "float16" in supported else supported[0]
    if config_dtype == "float32":
        return preferred
    if config_dtype in supported:
        return config_dtype
    warnings.warn(
        f"{platform.name} does not support {config_dtype}: served as {preferred}",
        UserWarning,
        stacklevel=2,
    )
    return preferred


def plan_startup(platform: Platform, dtype: str) -> dict[str, Any]:
    """What an engine decides at its start. Given, and never to be edited."""
    return {
        "platform": platform.name,
        "attention_backend": platform.attention_backend,
        "dtype": platform.check_dtype(dtype),
        "use_graphs": platform.supports_graphs,
    }
