"""Which connector an engine has, what it does with it, and what a failed load means.

Promises: vLLM's names, defaults and checks. Mirrors `vllm/config/kv_transfer.py:23`
`KVTransferConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from mini_vllm.checks import config_of, known_names

KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
KV_LOAD_FAILURE_POLICIES = ("fail", "recompute")


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """What `LLM(kv_transfer_config=...)` takes; a dict of these names will do."""

    kv_connector: str
    """The name of the connector."""
    kv_role: str
    """Whether this engine produces K and V, consumes them, or both."""
    engine_id: str = ""
    """Names this engine to its peers; a random one by default."""
    kv_load_failure_policy: str = "fail"
    """What follows when K and V cannot be loaded: the request fails, or "recompute"."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """What the connector itself understands."""

    def __post_init__(self) -> None:
        for name, known in (
            ("kv_role", KV_ROLES), ("kv_load_failure_policy", KV_LOAD_FAILURE_POLICIES)
        ):  # fmt: skip
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r}: need one of {', '.join(known)}")
        if not isinstance(self.kv_connector, str) or not self.kv_connector:
            raise ValueError(f"kv_connector={self.kv_connector!r}: need the name of a connector")
        if not isinstance(self.engine_id, str):
            raise ValueError(f"engine_id={self.engine_id!r}: need a text")
        if not isinstance(self.kv_connector_extra_config, Mapping):
            extra = self.kv_connector_extra_config
            raise ValueError(f"kv_connector_extra_config={extra!r}: need a mapping")
        if not self.engine_id:
            object.__setattr__(self, "engine_id", str(uuid4()))

    @classmethod
    def of(cls, given: Any) -> KVTransferConfig:
        """The config, of one or of a mapping with its names.

        Raises:
            ValueError: neither, an unknown name, or a value out of range.
        """
        return config_of(cls, "kv_transfer_config", given, "kv_connector", "kv_role")

    @property
    def is_kv_producer(self) -> bool:
        """Whether other engines may read its K and V."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Whether it may read those of others."""
        return self.kv_role in ("kv_consumer", "kv_both")

    def extra(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """What the connector itself takes: `known` has its names and defaults.

        Raises:
            ValueError: a name that it does not know.
        """
        extra = self.kv_connector_extra_config
        known_names("kv_connector_extra_config", extra, known)
        return {**known, **extra}
