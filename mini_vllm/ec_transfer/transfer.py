"""From `ec_transfer_config` to both halves of a connector, in an engine whose model sees.

Promises: an engine without it is as it was; what was not compared together with it is refused by
name. Stands where `vllm/distributed/ec_transfer/ec_connector/factory.py:20` `ECConnectorFactory`
makes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_vllm.ec_transfer.base import ECConnectorBase, ECConnectorRole, ECTransfer, RowsOf
from mini_vllm.ec_transfer.config import ECTransferConfig
from mini_vllm.ec_transfer.example import ECExampleConnector
from mini_vllm.ec_transfer.producer import EncoderOnlyModel
from mini_vllm.ec_transfer.sockets import ECSocketConnector, EncoderFingerprint

if TYPE_CHECKING:
    from mini_vllm.features import EngineSetup

NOT_COMPARED = "structured_outputs_config", "kv_transfer_config"
"""Arguments of the engine that were not compared together with a connector for rows. Ranks, drafts
and adapters are refused with every model that sees."""


@dataclass(frozen=True, slots=True)
class Place:
    """The engine that a connector is made for."""

    rows_of: RowsOf
    fingerprint: EncoderFingerprint


def _over_files(config: ECTransferConfig, role: ECConnectorRole, place: Place) -> ECConnectorBase:
    return ECExampleConnector(config, role, place.rows_of)


def _over_sockets(config: ECTransferConfig, role: ECConnectorRole, place: Place) -> ECConnectorBase:
    return ECSocketConnector(config, role, place.rows_of, place.fingerprint)


Make = Callable[[ECTransferConfig, ECConnectorRole, Place], ECConnectorBase]
CONNECTORS: dict[str, Make] = {
    "ECExampleConnector": _over_files,
    "ECSocketConnector": _over_sockets,
}


def create_connector(
    config: ECTransferConfig, role: ECConnectorRole, place: Place
) -> ECConnectorBase:
    """One half of the connector that `config` names.

    Raises:
        ValueError: an unknown name, or an argument that the connector refuses.
    """
    if config.ec_connector not in CONNECTORS:
        known = ", ".join(CONNECTORS)
        raise ValueError(f"ec_connector={config.ec_connector!r}: need one of {known}")
    return CONNECTORS[config.ec_connector](config, role, place)


def open_connector(
    given: Any, weights: Mapping[str, np.ndarray], hidden_size: int, setup: EngineSetup
) -> ECTransfer:
    """Both halves of a connector, for the engine that is being built.

    An engine that produces and does not consume only encodes: its language model does not run, it
    keeps no K and V, and no prefix of a prompt is taken from a cache, since a prompt whose pictures
    are behind a hit would not be encoded.

    Args:
        given: `ec_transfer_config`.
        weights: of tower and projector; a hash of them is what two engines over a socket share.
        hidden_size: of the rows.
        setup: the engine.

    Raises:
        ValueError: a config that is not one, or a feature that was not compared with a connector.
    """
    config = ECTransferConfig.of(given)
    for name in NOT_COMPARED:
        if value := setup.arguments.get(name):
            raise ValueError(f"{name}={value!r}: need none with ec_transfer_config")
    if setup.parts.origin:
        raise ValueError(f"{setup.parts.origin}: need 0.22.1 with ec_transfer_config")
    for name in setup.parts.rooms.get("multimodal", {}):
        raise ValueError(f"{name}: need the engine's own with ec_transfer_config")
    loaded = setup.load()
    dtype = np.dtype(loaded.dtype)
    fingerprint = EncoderFingerprint(hash_of(weights), dtype.name, hidden_size)
    place = Place(RowsOf(hidden_size, dtype), fingerprint)
    made = ECTransfer(
        create_connector(config, ECConnectorRole.SCHEDULER, place),
        create_connector(config, ECConnectorRole.WORKER, place),
    )
    if not config.is_ec_consumer:
        only = EncoderOnlyModel(loaded.vocab_size, dtype)
        setup.loaded = replace(loaded, model=only, kv_specs=())
        cache = replace(setup.config.cache, enable_prefix_caching=False)
        setup.config = replace(setup.config, cache=cache)
    return made


def hash_of(weights: Mapping[str, np.ndarray]) -> str:
    """What tells the rows of two towers apart: a hash of all their weights."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(f"{name} {weights[name].shape}:".encode())
        found.update(np.ascontiguousarray(weights[name], "<f4").data)
    return found.hexdigest()[:16]
