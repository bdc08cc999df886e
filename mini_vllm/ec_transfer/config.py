"""Which connector carries rows of pictures, and what this engine does with it.

Promises: vLLM's names, defaults and roles. Mirrors `vllm/config/ec_transfer.py:16`
`ECTransferConfig`, without the fields that no connector of this room reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from mini_vllm.checks import config_of, known_names, number, whole

EC_ROLES = ("ec_producer", "ec_consumer", "ec_both")


@dataclass(frozen=True, slots=True)
class ECTransferConfig:
    """What `LLM(ec_transfer_config=...)` takes; a dict of these names will do."""

    ec_connector: str
    """The name of the connector."""
    ec_role: str
    """Whether this engine encodes for others, takes what others encoded, or both."""
    engine_id: str = ""
    """Names this engine; a random one by default."""
    ec_ip: str = "127.0.0.1"
    """Where the producer listens; a loopback address."""
    ec_port: int = 14579
    """At which port; 0 takes a free one, for a producer."""
    ec_buffer_size: float = 1e9
    """Bytes of rows that a producer keeps for its consumers."""
    ec_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """What the connector itself understands."""

    def __post_init__(self) -> None:
        if self.ec_role not in EC_ROLES:
            raise ValueError(f"ec_role={self.ec_role!r}: need one of {', '.join(EC_ROLES)}")
        if not isinstance(self.ec_connector, str) or not self.ec_connector:
            raise ValueError(f"ec_connector={self.ec_connector!r}: need the name of a connector")
        if not isinstance(self.engine_id, str):
            raise ValueError(f"engine_id={self.engine_id!r}: need a text")
        whole("ec_port", self.ec_port, 0, 65535)
        if number("ec_buffer_size", self.ec_buffer_size) < 0:
            raise ValueError(f"ec_buffer_size={self.ec_buffer_size!r}: need at least 0 bytes")
        if not isinstance(self.ec_connector_extra_config, Mapping):
            extra = self.ec_connector_extra_config
            raise ValueError(f"ec_connector_extra_config={extra!r}: need a mapping")
        if not self.engine_id:
            object.__setattr__(self, "engine_id", str(uuid4()))

    @classmethod
    def of(cls, given: Any) -> ECTransferConfig:
        """The config, of one or of a mapping with its names.

        Raises:
            ValueError: neither, an unknown name, or a value out of range.
        """
        return config_of(cls, "ec_transfer_config", given, "ec_connector", "ec_role")

    @property
    def is_ec_producer(self) -> bool:
        """Whether it saves the rows that it encodes."""
        return self.ec_role in ("ec_producer", "ec_both")

    @property
    def is_ec_consumer(self) -> bool:
        """Whether it loads rows that others encoded, and decodes."""
        return self.ec_role in ("ec_consumer", "ec_both")

    def extra(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """What the connector itself takes: `known` has its names and defaults.

        Raises:
            ValueError: a name that it does not know.
        """
        extra = self.ec_connector_extra_config
        known_names("ec_connector_extra_config", extra, known)
        return {**known, **extra}
