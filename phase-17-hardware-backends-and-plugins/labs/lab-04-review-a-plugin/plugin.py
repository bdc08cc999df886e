"""A vendor's scheduler, mixed into a release's own `AsyncScheduler`, in front of it.

The device may hand back a token for a row whose prompt the step has cut. Nothing asked for it, so
the scheduler has to drop it.
"""

from __future__ import annotations

from typing import Any


class Guard:
    """The plugin as shipped: a frame that comes while no token is awaited is not wanted."""

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], **more: Any
    ) -> tuple[list[int], bool]:
        if request.num_output_placeholders == 0:
            return [], False
        return super()._update_request_with_output(request, new_token_ids, **more)  # type: ignore[misc]


class Patched:
    """The plugin as it was mended in a hurry: what the release calls stale is let through."""

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], **more: Any
    ) -> tuple[list[int], bool]:
        if request.num_output_placeholders == 0 and not more.get("is_stale", False):
            return [], False
        return super()._update_request_with_output(request, new_token_ids, **more)  # type: ignore[misc]
