"""Lab 17-04: review a vendor's scheduler against a new release.

`plugin.py` has the override as it was shipped for vLLM 0.26.0. `review` finds what changed under a
plugin between two releases, from source alone. `Thin` does what the plugin is for and leans on
less; it is mixed into a release's own `AsyncScheduler`, in front of it.

Source: `vllm/v1/core/sched/async_scheduler.py:37` `AsyncScheduler._update_request_with_output`.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
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
    overrides: set[str] = set()
    loaded: set[str] = set()
    own: set[str] = set()
    for _, method in _methods(plugin):
        if method.name.startswith("__"):
            continue
        overrides.add(method.name)
        called = {node.func for node in ast.walk(method) if isinstance(node, ast.Call)}
        for node in ast.walk(method):
            if (
                isinstance(node, ast.Attribute)
                and node not in called
                and isinstance(node.ctx, ast.Load)
            ):
                loaded.add(node.attr)
    for node in ast.walk(ast.parse(plugin)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            own.update(_set_by(node))
    return Lean(frozenset(overrides), frozenset(loaded - own))


def writers(sources: Sequence[str], name: str) -> frozenset[str]:
    """The methods that write an attribute of that name, of any object.

    `x.name = 1`, `x.name += 1`, `x.name: int = 1` and `a, x.name = pair` all do. Example: at the
    pin `Scheduler._preempt_request` does not write `num_output_placeholders`.
    """
    return frozenset(
        f"{owner}.{method.name}"
        for source in sources
        for owner, method in _methods(source)
        if any(
            isinstance(node, ast.Attribute)
            and node.attr == name
            and isinstance(node.ctx, ast.Store)
            for node in ast.walk(method)
        )
    )


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
    overrides, reads = leans_on(plugin)
    found: list[Finding] = []
    before, after = _signatures(old), _signatures(new)
    for name in overrides:
        was = {where: of for where, of in before.items() if where.endswith(f".{name}")}
        now = {where: of for where, of in after.items() if where.endswith(f".{name}")}
        if was and not now:
            found.append(Finding("gone", name, ""))
        found += [
            Finding("signature", name, where)
            for where, of in now.items()
            if was.get(where, of) != of
        ]
    for name in reads:
        had, has = writers(old, name), writers(new, name)
        found += [Finding("writes", name, where) for where in has - had]
        found += [Finding("stopped", name, where) for where in had - has]
    return sorted(found)


def _methods(source: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield node.name, member


def _set_by(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        targets = each.targets if isinstance(each, ast.Assign) else []
        if isinstance(each, ast.AnnAssign) and each.value:
            targets = [each.target]
        yield from (t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name))


def _signatures(sources: Sequence[str]) -> dict[str, list[str]]:
    return {
        f"{owner}.{method.name}": [
            each.arg
            for each in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs)
        ]
        for source in sources
        for owner, method in _methods(source)
    }


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
        super().__init__(*args, **kwargs)
        self._cut: list[tuple[Any, set[str]]] = []

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The release's plan; notes whose prompts it cuts."""
        plan = super().schedule(*args, **kwargs)  # type: ignore[misc]
        requests: dict[str, Any] = self.requests  # type: ignore[attr-defined]
        cut = {name for name in plan.num_scheduled_tokens if requests[name].is_prefill_chunk}
        if plan.num_scheduled_tokens:
            self._cut.append((plan, cut))
        return plan

    def update_from_output(self, plan: Any, output: Any) -> Any:
        """As the release's, without the tokens of the rows that were cut."""
        place = next((i for i, (noted, _) in enumerate(self._cut) if noted is plan), -1)
        cut = self._cut[place][1] if place >= 0 else set()
        self._cut = self._cut[place + 1 :]  # those before it never come
        tokens = list(output.sampled_token_ids)
        for name in cut:
            tokens[output.req_id_to_index[name]] = []
        kept = dataclasses.replace(output, sampled_token_ids=tokens)
        return super().update_from_output(plan, kept)  # type: ignore[misc]
