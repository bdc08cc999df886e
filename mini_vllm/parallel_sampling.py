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
        self._children[request_id] = list(children)
        self._parent |= dict.fromkeys(self._children[request_id], request_id)

    def children(self, request_id: str) -> Sequence[str]:
        """Its live children; a request that was not fanned out stands for itself."""
        return tuple(self._children.get(request_id, (request_id,)))

    def forget(self, request_id: str) -> None:
        """The child `request_id` is gone; its parent is with the last one."""
        parent = self._parent.pop(request_id, None)
        if parent is not None:
            self._children[parent].remove(request_id)
            if not self._children[parent]:
                del self._children[parent]
