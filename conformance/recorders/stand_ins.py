"""What the real scheduler is given in place of a grammar, its backend and a connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.real_core.stand_ins import Given, Strict


class Scripted:
    """What the real engine asks of a grammar."""

    def __init__(self, reject_at: int | None) -> None:
        self.reject_at, self.position = reject_at, 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        first, self.position = self.position, self.position + len(tokens)
        return self.reject_at is None or not first <= self.reject_at < self.position

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The drafts before the position that it refuses."""
        if self.reject_at is None:
            return tokens
        return tokens[: max(0, self.reject_at - self.position)]

    def rollback(self, num_tokens: int) -> None:
        self.position -= num_tokens

    def is_terminated(self) -> bool:
        return False

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        bitmask[index] = 0


class Masks:
    """The backend, as far as the manager needs it to fill rows."""

    def allocate_token_bitmask(self, rows: int) -> Any:
        import torch

        return torch.zeros((rows, 1), dtype=torch.int32)


class Failing:
    """Which blocks a scripted worker reports as not loaded, and when.

    `kv["fails"]` of a request says it: `blocks` are indices into the blocks that hold tokens from
    outside, modulo their number, and the first `times` loads fail.
    """

    def __init__(self, script: Mapping[str, Mapping[str, Any]]) -> None:
        self.script = script
        self.found: dict[str, int] = {}
        """Tokens that the cache had when the connector was asked last."""
        self.num_failed: dict[str, int] = {}
        self.block_size = 0
        self.reports: dict[int, set[int]] = {}
        """By step."""

    def load(self, request_id: str, block_ids: list[int], external: int, due: int) -> None:
        """A load begins whose end is reported in the step `due`."""
        fails = self.script[request_id].get("fails")
        failed = self.num_failed.get(request_id, 0)
        if not fails or failed >= fails["times"]:
            return
        self.num_failed[request_id] = failed + 1
        first, end = self.found[request_id], self.found[request_id] + external
        held = block_ids[first // self.block_size : -(-end // self.block_size)]
        self.reports.setdefault(due, set()).update(held[i % len(held)] for i in fails["blocks"])

    def at(self, step: int) -> list[int]:
        """The blocks that the update of this step reports."""
        known = [each for each in self.reports if each <= step]
        return sorted(set[int]().union(*(self.reports.pop(each) for each in known)))


class Connector(Strict):
    """What the real scheduler asks of its connector; a pure function of the script.

    What 0.28.0 and newer ask besides (`supports_divergent_local_hybrid_hits`,
    `has_pending_block_frees`, `get_loaded_kv_cache_group_ids`) is answered as the base class of
    0.33.0 does. It is attached to a scheduler that was made without one: what a constructor reads
    off a connector keeps its default.
    """

    supports_divergent_local_hybrid_hits = False

    def __init__(self, script: Mapping[str, Mapping[str, Any]]) -> None:
        self.script = script
        self.fails = Failing(script)
        self.now = 0
        """The step that is under way."""
        self.loads: dict[str, int] = {}
        """Loads under way: the step whose update reports each."""
        self.sends: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, found: int) -> tuple[int | None, bool]:
        """Tokens beyond those that the cache has, and whether they come later; None: not known."""
        kv = self.script.get(request.request_id)
        if kv is None:
            return 0, False
        if self.now < kv["known_at"]:
            return None, False
        more = max(0, kv["external_tokens"] - found)
        self.fails.found[request.request_id] = found
        return more, bool(kv["load_async"] and more)

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """Begin to load what was promised."""
        kv = self.script.get(request.request_id)
        if kv is None or not external:
            return
        due = self.now
        if kv["load_async"]:
            if kv["load_steps"] is None:  # the remote never answers
                return
            due += kv["load_steps"]
            self.loads[request.request_id] = due
        self.fails.load(request.request_id, blocks.get_block_ids()[0], external, due)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Whether the blocks are kept until they are sent."""
        kv = self.script.get(request.request_id)
        ended = str(request.get_finished_reason()) in ("stop", "length")
        if kv is None or kv["send_steps"] is None:
            return False, None
        unasked = kv.get("unasked", "")
        if not ended and unasked != "send":
            return False, None
        self.sends[request.request_id] = self.now + kv["send_steps"]
        return unasked != "report", None

    def reports(self) -> tuple[list[str], list[str]]:
        """Ids whose load, and whose send, the update of this step reports."""
        done = []
        for under_way in (self.loads, self.sends):
            ids = sorted(r for r, step in under_way.items() if step <= self.now)
            for request_id in ids:
                del under_way[request_id]
            done.append(ids)
        return done[0], done[1]

    def output(self, recving: list[str], sending: list[str], invalid: Sequence[int] = ()) -> Any:
        """`KVConnectorOutput`; lists, since upstream walks sets in no order."""
        return Given(
            "kv_connector_output",
            {
                "finished_recving": recving, "finished_sending": sending, "failed_recving": (),
                "invalid_block_ids": set(invalid), "kv_connector_stats": None,
                "kv_cache_events": None, "kv_connector_worker_meta": None,
            },
        )  # fmt: skip

    def build_connector_meta(self, plan: Any) -> None:
        """What the worker would be told."""

    def get_kv_connector_stats(self) -> None:
        """Nothing is counted."""

    def on_new_request(self, request: Any) -> None:
        """Nothing is looked up before it is asked."""

    def update_connector_output(self, output: Any) -> None:
        """The scheduler reads the output itself."""

    def take_events(self) -> tuple[()]:
        """No KV events."""
        return ()

    def has_pending_block_frees(self) -> bool:
        """No transfer gives blocks back in place of a preemption."""
        return False

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """The groups that a load fills: the only one."""
        return (0,)
