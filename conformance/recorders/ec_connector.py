"""The pin's own example connector for rows of pictures, with a script in place of its files.

The scheduler's half of `vllm/distributed/ec_transfer/ec_connector/example_connector.py:45`
`ECExampleConnector` runs as it is written; `has_cache_item` alone is answered by the script.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from conformance.real_core import answers, core_of
from conformance.real_core.archive import Archive
from conformance.real_core.namespace import REAL, Namespace
from conformance.real_core.stand_ins import Given
from conformance.recorders.source import Real

_MODULE = "vllm.distributed.ec_transfer.ec_connector"


@functools.cache
def example_connector(archive: Archive, version: str) -> Any:
    """The class, as a release has it: no torch, no file is touched until it is asked."""
    real = (*REAL, f"{_MODULE}.base", f"{_MODULE}.example_connector")
    world = Namespace(archive, version, answers.values(), real)
    return world.load(f"{_MODULE}.example_connector").ECExampleConnector


def scripted(config: Mapping[str, Any], real: Real) -> Any:
    """The scheduler's half for a recording's `config`.

    Args:
        config: `ec_role`, and `ec_has`: by hash the steps at which the answer changes.
        real: the real core; the installed package takes the pin's class.
    """
    core: Any = real if hasattr(real, "namespace") else core_of()
    base = example_connector(core.namespace.archive, core.version)

    class Scripted(base):  # type: ignore[misc,valid-type]
        now = 0

        def has_cache_item(self, identifier: str) -> bool:
            return sum(step <= self.now for step in config["ec_has"][identifier]) % 2 == 1

    role = config["ec_role"]
    told = {
        "is_ec_producer": role in ("ec_producer", "ec_both"),
        "is_ec_consumer": role in ("ec_consumer", "ec_both"),
        "get_from_extra_config": lambda key, default: "/nowhere",
    }
    transfer = Given("ec_transfer_config", told)
    return Scripted(Given("vllm_config", {"ec_transfer_config": transfer}), None)
