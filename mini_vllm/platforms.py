"""One object that answers what depends on the hardware: which attention, which defaults, how much.

Promises: nothing is resolved until a platform is asked for; one that cannot be loaded, names an
attention that is not there, or says of its memory what cannot be is refused by name, before a
request is taken. Mirrors `vllm/platforms/interface.py:105` `Platform` and
`vllm/platforms/__init__.py:212` `resolve_current_platform_cls_qualname`.

Upstream passes over a plugin that raises, and lets a plugin replace a built-in of the same name.
Here both are refused: who installed it wants to know.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, ClassVar

from mini_vllm.attention import paged_attention, paged_attention_reference
from mini_vllm.config import EngineConfig
from mini_vllm.models.transformer import AttentionFn, Transformer
from mini_vllm.parts import EngineParts

__all__ = ["GROUP", "CpuPlatform", "Platform", "PlatformError", "check_memory", "fit", "resolve"]

GROUP = "mini_vllm.platform_plugins"
"""The group of entry points. Each is a function without arguments that gives the platform's class
as "module.Class", or None where its hardware is not there."""

ATTENTION: dict[str, AttentionFn] = {
    "PAGED": paged_attention,
    "REFERENCE": paged_attention_reference,
}
"""What a platform may name as its attention; a plugin's module may add its own."""


class PlatformError(ValueError):
    """A platform cannot be used; the message names it and says why."""


class Platform:
    """What an engine asks of the hardware. A plugin's class derives from it."""

    name: ClassVar[str] = ""
    """For messages, such as "cpu"."""
    attention_backend: ClassVar[str] = "PAGED"
    """A key of `ATTENTION`."""
    supported_dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")
    """What the engine's `dtype` may be."""
    on_host: ClassVar[bool] = False
    """Whether its memory is the machine's own, which can be checked."""

    def memory(self) -> tuple[int, int]:
        """(total, free) memory in bytes. Every platform must say it, as upstream's must:
        `vllm/platforms/interface.py:380` `Platform.get_device_total_memory`."""
        raise NotImplementedError

    def defaults(self) -> Mapping[str, Any]:
        """Arguments of the engine that have another default here."""
        return {}

    def check_and_update_config(self, config: EngineConfig) -> EngineConfig:
        """The configuration as it can be served; what was asked for may be overruled."""
        return config

    def transformer(self) -> type[Transformer] | None:
        """What computes Llama-family models in the place of `Transformer`; None: that one."""
        return None


class CpuPlatform(Platform):
    """The machine's processors, with the defaults that upstream moves for them."""

    name = "cpu"
    on_host = True

    def memory(self) -> tuple[int, int]:
        """Of the whole machine; upstream asks for one NUMA node's."""
        return _host_memory()

    def defaults(self) -> Mapping[str, Any]:
        """Blocks of 128 (`vllm/platforms/cpu.py:110` `CpuPlatform.check_and_update_config`) and the
        budget of offline use (`vllm/engine/arg_utils.py:2353`
        `EngineArgs.get_batch_defaults`)."""
        return {"block_size": 128, "max_num_batched_tokens": 4096, "max_num_seqs": 256}

    def check_and_update_config(self, config: EngineConfig) -> EngineConfig:
        """No plan is made ahead of its tokens, whether it was asked for or not."""
        return replace(config, scheduler=replace(config.scheduler, async_scheduling=False))


def _cpu_plugin() -> str | None:
    return "mini_vllm.platforms.CpuPlatform"


def _torch_plugin() -> str | None:
    if find_spec("torch") is None:
        raise PlatformError(
            "platform='torch': torch is not installed; put `uv run --extra torch` before "
            "the command"
        )
    return "mini_vllm.models.torch_backend.TorchPlatform"


BUILT_IN: dict[str, Callable[[], str | None]] = {"cpu": _cpu_plugin, "torch": _torch_plugin}


def resolve(name: str = "auto") -> Platform:
    """The platform to serve on.

    Args:
        name: "auto" takes the one plugin that says it is there, and the CPU where none does. Any
            other is the name of a built-in or of an entry point.

    Raises:
        PlatformError: a plugin does not load, several say that they are there, two have one name,
            or there is none of that name.
    """
    plugins = _plugins()
    known = {**BUILT_IN, **plugins}
    if name != "auto":
        if name not in known:
            raise PlatformError(f"platform={name!r}: need auto or one of {', '.join(known)}")
        path = _class_path(name, known[name])
        if path is None:
            raise PlatformError(
                f"platform={name!r}: its plugin found no hardware for it on this machine; "
                "platform='cpu' runs anywhere"
            )
        return _made(name, path)
    there = {
        each: path
        for each, function in plugins.items()
        if (path := _class_path(each, function)) is not None
    }
    if len(there) > 1:
        raise PlatformError(
            f"platform='auto': the plugins of {', '.join(there)} all found their hardware; name "
            "one of them, or uninstall the others"
        )
    for each, path in there.items():
        return _made(each, path)
    return CpuPlatform()


def fit(
    platform: Platform, parts: EngineParts | None, knobs: Mapping[str, Any]
) -> tuple[EngineParts, EngineConfig, dict[str, Any]]:
    """An engine's parts, configuration and other arguments, as the platform wants them.

    Args:
        platform: from `resolve`.
        parts: those asked for. One's own attention goes before the platform's.
        knobs: what a caller gave; defaults of the platform fill in the rest.

    Raises:
        PlatformError: an unknown attention, a dtype that it does not support, or a default that is
            no argument of the engine.
        ValueError: an argument out of range.
    """
    if platform.attention_backend not in ATTENTION:
        raise PlatformError(
            f"platform {platform.name!r}: attention_backend={platform.attention_backend!r}: need "
            f"one of {', '.join(ATTENTION)}"
        )
    parts = EngineParts() if parts is None else parts
    if parts.attention is paged_attention:
        parts = replace(parts, attention=ATTENTION[platform.attention_backend])
    mine = _names(EngineConfig)
    moved = platform.defaults()
    for name in moved:
        if name not in mine:
            raise PlatformError(
                f"platform {platform.name!r}: defaults() sets {name!r}, which is not a field of "
                "EngineConfig"
            )
    settings = {name: value for name, value in knobs.items() if name in mine}
    others = {name: value for name, value in knobs.items() if name not in mine}
    config = platform.check_and_update_config(EngineConfig.of({**moved, **settings}))
    if not isinstance(config, EngineConfig):
        raise PlatformError(
            f"platform {platform.name!r}: check_and_update_config gave {config!r}: need an "
            "EngineConfig"
        )
    if config.dtype not in platform.supported_dtypes:
        raise PlatformError(
            f"platform {platform.name!r}: dtype={config.dtype!r}: need one of "
            f"{', '.join(platform.supported_dtypes)}"
        )
    if (transformer := platform.transformer()) is not None:
        if rooms := [name for name, value in others.items() if value]:
            raise PlatformError(
                f"platform {platform.name!r} with {', '.join(rooms)}: the two were not compared "
                "together; need platform='cpu', or none of these arguments"
            )
        models = {**parts.rooms.get("models", {}), "transformer": transformer}
        parts = replace(parts, rooms={**parts.rooms, "models": models})
    return parts, config, others


def check_memory(platform: Platform, needed: int) -> None:
    """Refuse a platform whose word about its memory cannot be, or that has less than `needed`.

    Args:
        platform: whose word it is.
        needed: bytes of the KV cache.

    Raises:
        PlatformError: it does not say, says what is not a pair of sizes, more than the machine has
            where its memory is the machine's, or too little.
    """
    try:
        said = platform.memory()
    except NotImplementedError:
        raise PlatformError(
            f"platform {platform.name!r}: its class does not define memory(); need a method that "
            "returns (total, free) in bytes"
        ) from None
    except Exception as error:
        raise PlatformError(f"platform {platform.name!r}: memory() failed: {error!r}") from error
    whole = isinstance(said, tuple) and len(said) == 2 and all(type(n) is int for n in said)
    if not whole or not 0 <= said[1] <= said[0] or said[0] == 0:
        raise PlatformError(
            f"platform {platform.name!r}: memory() gave {said!r}: need (total, free) in bytes, "
            "whole numbers, free at most total, total above 0"
        )
    total, free = said
    if platform.on_host and total > (has := _host_memory()[0]):
        raise PlatformError(
            f"platform {platform.name!r}: memory() says {total:,} bytes in all; this machine has "
            f"{has:,}"
        )
    if needed > free:
        raise PlatformError(
            f"platform {platform.name!r}: the KV cache needs {needed:,} bytes, {free:,} are free; "
            "lower num_blocks or block_size"
        )


def _plugins() -> dict[str, Callable[[], Any]]:
    """The functions of the entry points, by name; a name of another or of a built-in is refused."""
    found: dict[str, Callable[[], Any]] = {}
    for point in entry_points(group=GROUP):
        if point.name in found or point.name in BUILT_IN:
            raise PlatformError(
                f"platform {point.name!r}: {point.value} has the name of another platform; "
                "rename its entry point, or uninstall it"
            )
        try:
            found[point.name] = point.load()
        except Exception as error:
            raise PlatformError(
                f"platform {point.name!r}: {point.value} does not load: {error!r}"
            ) from error
    return found


def _class_path(name: str, function: Callable[[], Any]) -> str | None:
    """The path of a platform's class, None where its hardware is not there."""
    try:
        path = function()
    except PlatformError:
        raise
    except Exception as error:
        raise PlatformError(f"platform {name!r}: its plugin failed: {error!r}") from error
    if path is not None and not (isinstance(path, str) and "." in path):
        raise PlatformError(f"platform {name!r}: its plugin gave {path!r}: need 'module.Class'")
    return path


def _made(name: str, path: str) -> Platform:
    """An instance of the class at `path`."""
    module, _, kind = path.rpartition(".")
    try:
        made = getattr(import_module(module), kind)()
    except Exception as error:
        raise PlatformError(f"platform {name!r}: {path} does not load: {error!r}") from error
    if not isinstance(made, Platform):
        raise PlatformError(
            f"platform {name!r}: {path} made a {type(made).__name__}: need a subclass of "
            "mini_vllm.platforms.Platform"
        )
    if not made.name:
        made.name = name  # type: ignore[misc]
    return made


def _names(config: type[EngineConfig]) -> set[str]:
    """Arguments that belong to the configuration, as callers write them."""
    made = config()
    flat = {*made.cache.__slots__, *made.scheduler.__slots__, *made.__slots__}
    return (flat - {"cache", "scheduler"}) | {"scheduling_policy"}


def _host_memory() -> tuple[int, int]:
    """(total, free) bytes of this machine's memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
