"""Lab 17-04: review a vendor's scheduler against a new release.

`plugin.py` has the override as it was shipped for vLLM 0.26.0. `review` finds what changed under a
plugin between two releases, from source alone. `Thin` does what the plugin is for and leans on
less; it is mixed into a release's own `AsyncScheduler`, in front of it.

Source: `vllm/v1/core/sched/async_scheduler.py:37` `AsyncScheduler._update_request_with_output`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Lean(NamedTuple):
    """What a plugin's classes stand on."""

    overrides: frozenset[str]
    """Methods that they define, without those of the language (`__init__`)."""
    reads: frozenset[str]
    """Attributes that these methods read of others: not called, and set nowhere in the plugin,
    neither by a method nor by a class's body. An annotation without a value sets nothing."""


class Finding(NamedTuple):
    """One reason to look again."""

    kind: str
    """"gone", "signature", "writes" (and did not) or "stopped" (writing)."""
    name: str
    """Of the method that is overridden, or of the attribute that is read."""
    where: str
    """The release's method, as `Scheduler.schedule`; of "gone" empty."""


def leans_on(plugin: str) -> Lean:
    """What the classes of a plugin's source override and read.

    Example: of `Guard` in `plugin.py` ({_update_request_with_output}, {num_output_placeholders}).
    """
    raise NotImplementedError


def writers(sources: Sequence[str], name: str) -> frozenset[str]:
    """The methods that write an attribute of that name, of any object.

    `x.name = 1`, `x.name += 1`, `x.name: int = 1` and `a, x.name = pair` all do. Example: at the
    pin `Scheduler._preempt_request` does not write `num_output_placeholders`.
    """
    raise NotImplementedError


def review(plugin: str, old: Sequence[str], new: Sequence[str]) -> list[Finding]:
    """What changed under a plugin between two releases, sorted.

    Args:
        plugin: its source.
        old: sources of the release for which it was written.
        new: of the release to be taken.

    A method that is overridden is gone if a class of `old` defines it and none of `new` does. It
    has another signature where the names of its parameters differ, by class, `*args` and `**kwargs`
    aside. Methods may be `async`. An attribute that an override
    reads has another meaning, perhaps, where a method begins to write it, or stops. A method that
    writes it and is new counts, one that is gone as well.
    """
    raise NotImplementedError


class Thin:
    """The override that survives: it stands on what an engine calls, and on what it noted itself.

    Made-up tokens never reach the scheduler, and every other token does: on 0.22.1, 0.26.0, 0.27.0
    and 0.33.0, on a device that makes up a token for every row of a prompt that is cut.

    What an engine calls: `schedule(...)` gives a plan with `num_scheduled_tokens` (by request id),
    and afterwards `self.requests[id].is_prefill_chunk` says whether the plan leaves a part of the
    prompt. `update_from_output(plan, output)` brings the tokens of a plan later, when the next one
    has been made: `output.req_id_to_index[id]` is the place of a request in
    `output.sampled_token_ids`, a list of lists. Plans come back in the order in which they were
    made, and one may never come back: what came back is let go, with what was made before it.
    Arguments that a release adds to `schedule` go through, by place or by name; `output` stays what
    it was.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The release's plan; notes whose prompts it cuts."""
        raise NotImplementedError

    def update_from_output(self, plan: Any, output: Any) -> Any:
        """As the release's, without the tokens of the rows that were cut."""
        raise NotImplementedError
