"""What 0.23.0 changed for drafts: their slots are taken with the admission.

Places are those of the release's own archive; the pin has none of these lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.plan import ExternalTokens
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler


class LookaheadAtAdmission(Scheduler):
    """A request that is admitted gets slots for the drafts of its next step, too.

    At the pin a request of which nothing is computed gets none, so a full pool may admit it and
    preempt it one step later. `vllm/v1/core/sched/scheduler.py`, lines 736-739 of 0.23.0
    `Scheduler.schedule`.
    """

    def _allocate(
        self, request: Request, num_new: int, hits: Sequence[KVCacheBlock],
        external: ExternalTokens, was_loaded: bool,
    ) -> bool:  # fmt: skip
        lookahead = self.config.num_lookahead_tokens
        if external.num_tokens or not lookahead:
            return super()._allocate(request, num_new, hits, external, was_loaded)
        if not self.kv.full_sequence_fits(request, hits):
            return False
        return self.kv.allocate_slots(request, num_new, hits, lookahead) is not None
