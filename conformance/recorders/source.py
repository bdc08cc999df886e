"""Where a recorder's real classes come from: the installed package, or a release's own core.

`conformance.real` has this face as a module, `conformance.real_core.RealCore` as an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast


class Real(Protocol):
    """The real scheduler, as far as a recorder needs it."""

    @property
    def upstream(self) -> Mapping[str, str]:
        """What a recording made with it says it was made from."""
        ...

    def make_scheduler(self, config: Any, async_scheduling: bool = False) -> Any:
        """The scheduler of a recording's `config`."""
        ...

    def make_request(
        self, add: Any, block_size: int, eos_token_id: int, num_hash_lookahead_tokens: int = 0
    ) -> Any:
        """The request of one entry of `events[...].add`."""
        ...

    def runner_output(self, plan: Any, sampled: Any) -> Any:
        """What a model runner would hand back."""
        ...

    def draft_token_ids(self, drafts: Mapping[str, list[int]]) -> Any:
        """What a model runner hands over after a step with drafts."""
        ...

    def abort(self, scheduler: Any, request_id: str) -> None:
        """End a request from outside."""
        ...


def installed() -> Real:
    """The `vllm` that this process imports, with the packages of `requirements-upstream.txt`."""
    from conformance import real

    return cast(Real, real)
