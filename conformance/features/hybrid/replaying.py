"""A replay with groups: `kv_groups` in the configuration, a table per group in every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conformance.features import Find, Replayed
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.kv_cache_interface import KVCacheSpec, MambaSpec


class Groups(Replayed):
    """A manager that keeps a table per request and group."""

    name = "kv"

    def is_on(self, config: Mapping[str, Any]) -> bool:
        return "kv_groups" in config

    def manager(
        self, config: Mapping[str, Any], make: Callable[..., Any], find: Find
    ) -> Callable[..., Any]:
        if make is KVCacheManager or make is find("kv_cache", "KVCacheManager"):
            make = find("kv.coordinator", "HybridKVCacheManager")
        return functools.partial(make, kv_specs=kv_specs_of(config))

    def gates(self, kv: Any, find: Find) -> Sequence[Any]:
        if not any(isinstance(group.spec, MambaSpec) for group in getattr(kv, "groups", ())):
            return ()
        return (find("kv.coordinator", "StateGate")(kv),)

    def observe(self, scheduler: Any, plan: Any) -> Mapping[str, Any]:
        kv = scheduler.kv
        if not (num_groups := len(getattr(kv, "groups", ()))):
            return {}
        tables = {
            r.request_id: [list(kv.get_block_ids(r.request_id, g)) for g in range(num_groups)]
            for r in scheduler.running
        }
        return {"block_ids": {request_id: each for request_id, each in tables.items() if any(each)}}


def kv_specs_of(config: Mapping[str, Any]) -> list[KVCacheSpec]:
    """The groups of a recording's configuration, a layer each."""
    return [
        MambaSpec(
            (index,), block_size=group["block_size"], mamba_cache_mode=group.get("mode", "all")
        )
        if group["kind"] == "mamba"
        else KVCacheSpec((index,), 1, 1, group.get("sliding_window"), group["block_size"])
        for index, group in enumerate(config["kv_groups"])
    ]


FEATURE = Groups()
