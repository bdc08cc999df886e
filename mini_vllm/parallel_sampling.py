"""`n` completions of one prompt: `n` requests that share its full blocks.

Promises: each child is an ordinary request with a seed of its own; nothing else in the engine knows
of parents. Mirrors `vllm/v1/engine/parallel_sampling.py:13` `ParentRequest`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def child_id(index: int, request_id: str) -> str:
    """The request id of completion `index`, upstream's form."""
    return f"{index}_{request_id}"


class Parents:
    """Which live requests were asked for as one."""

    def __init__(self) -> None:
        self._children: dict[str, list[str]] = {}
        self._parent: dict[str, str] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._children

    def add(self, request_id: str, children: Iterable[str]) -> None:
        """Remember the children of `request_id`."""
        siblings = list(children)
        self._parent |= dict.fromkeys(siblings, request_id)
        self._children[request_id] = siblings

    def children(self, request_id: str) -> Sequence[str]:
        """Its live children; a request that was not fanned out stands for itself."""
        return tuple(self._children.get(request_id, (request_id,)))

    def remove(self, request_id: str) -> None:
        """The child `request_id` is gone; its parent is with the last one.

        An interrupted call is made good by calling it again.
        """
        parent = self._parent.get(request_id)
        if parent is None:
            return
        siblings = self._children.get(parent, [])
        if request_id in siblings:
            siblings.remove(request_id)
        if not siblings:
            self._children.pop(parent, None)
        del self._parent[request_id]
