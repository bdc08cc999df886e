"""The connectors by name, and how each is made for an engine.

Promises: a name that is not known is refused with those that are. Mirrors
`vllm/distributed/kv_transfer/kv_connector/factory.py:27` `KVConnectorFactory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mini_vllm.kv_transfer.base import KVConnectorBase_V1, KVConnectorRole
from mini_vllm.kv_transfer.config import KVTransferConfig
from mini_vllm.kv_transfer.example import ExampleConnector
from mini_vllm.kv_transfer.offload import OffloadingConnector
from mini_vllm.kv_transfer.pull import PullConnector
from mini_vllm.kv_transfer.simulated import SimulatedNetwork
from mini_vllm.kv_transfer.sockets import SocketTransport
from mini_vllm.kv_transfer.wire import Fingerprint


@dataclass(frozen=True, slots=True)
class Place:
    """The engine that a connector is made for."""

    fingerprint: Fingerprint
    block_size: int
    enable_caching: bool


Make = Callable[[KVTransferConfig, KVConnectorRole, Place], KVConnectorBase_V1]


def _over_sockets(
    config: KVTransferConfig, role: KVConnectorRole, place: Place
) -> KVConnectorBase_V1:
    return PullConnector(config, role, place.fingerprint, SocketTransport)


def _over_a_simulated_network(
    config: KVTransferConfig, role: KVConnectorRole, place: Place
) -> KVConnectorBase_V1:
    rest = dict(config.kv_connector_extra_config)
    network = rest.pop("network", None)
    if not isinstance(network, SimulatedNetwork):
        raise ValueError(f"network={network!r}: need a SimulatedNetwork")
    config = replace(config, kv_connector_extra_config=rest)
    return PullConnector(config, role, place.fingerprint, network.connect, network.clock)


def _over_files(
    config: KVTransferConfig, role: KVConnectorRole, place: Place
) -> KVConnectorBase_V1:
    return ExampleConnector(config, role, place.fingerprint, place.block_size)


def _to_host_memory(
    config: KVTransferConfig, role: KVConnectorRole, place: Place
) -> KVConnectorBase_V1:
    return OffloadingConnector(config, role, place.block_size, place.enable_caching)


CONNECTORS: dict[str, Make] = {
    "SocketConnector": _over_sockets,
    "ExampleConnector": _over_files,
    "OffloadingConnector": _to_host_memory,
    "SimulatedConnector": _over_a_simulated_network,
}


def create_connector(
    config: KVTransferConfig, role: KVConnectorRole, place: Place
) -> KVConnectorBase_V1:
    """One half of the connector that `config` names.

    Raises:
        ValueError: an unknown name, or an extra argument that the connector refuses.
    """
    if config.kv_connector not in CONNECTORS:
        known = ", ".join(CONNECTORS)
        raise ValueError(f"kv_connector={config.kv_connector!r}: need one of {known}")
    return CONNECTORS[config.kv_connector](config, role, place)
