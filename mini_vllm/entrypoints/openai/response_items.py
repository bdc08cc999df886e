"""Items of `/v1/responses`, whole and as events.

Mirrors `vllm/entrypoints/openai/responses/streaming_events.py:1121`
`SimpleStreamingEventProcessor`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_vllm.entrypoints.openai.serving import sse


def message_item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": item_id, "content": content, "role": "assistant", "status": status,
        "type": "message", "phase": None,
    }  # fmt: skip


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "arguments": arguments, "call_id": call_id, "name": name, "type": "function_call",
        "id": item_id, "async": None, "caller": None, "namespace": None, "status": status,
    }  # fmt: skip


@dataclass(slots=True)
class ItemEvents:
    """Deltas of a message in, events of items out; one item is open at a time.

    Mirrors `vllm/entrypoints/openai/responses/streaming_events.py:1121`
    `SimpleStreamingEventProcessor`. An item's id in the stream is not its id in the whole answer.
    """

    sequence_number: int = 0
    index: int = 0
    """Of the item that is open, or the next one."""
    kind: str | None = None
    """Of the item that is open: "message" or "function_call"."""
    item_id: str = ""
    call_id: str = ""
    name: str = ""
    place: int | None = None
    """Which call of the text the open item is."""
    text: str = ""
    """Of the open item so far."""

    def numbered(self, event: Mapping[str, Any]) -> str:
        """The event as it is sent, numbered."""
        data = {**event, "sequence_number": self.sequence_number}
        self.sequence_number += 1
        return f"event: {event['type']}\n{sse(data)}"

    def feed(
        self, message: Mapping[str, Any], noted: Sequence[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """What one delta becomes."""
        if content := message.get("content"):
            if self.kind != "message":
                yield from self.closed()
                yield from self._opened_message()
            self.text += content
            yield self._at("response.output_text.delta", delta=content, content_index=0,
                           logprobs=list(noted))  # fmt: skip
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if self.kind != "function_call" or self.place != call["index"]:
                yield from self.closed()
                yield self._opened_call(function["name"], call["index"])
            if arguments := function.get("arguments"):
                self.text += arguments
                yield self._at("response.function_call_arguments.delta", delta=arguments)

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.item_id, "output_index": self.index, **fields}

    def _item(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": f"response.output_item.{kind}", "output_index": self.index, "item": item}

    def _opened_message(self) -> Iterator[dict[str, Any]]:
        self.kind, self.text, self.item_id = "message", "", uuid.uuid4().hex
        yield self._item("added", message_item(self.item_id, "in_progress", []))
        part: dict[str, Any] = {
            "annotations": [],
            "text": "",
            "type": "output_text",
            "logprobs": [],
        }
        yield self._at("response.content_part.added", content_index=0, part=part)

    def _opened_call(self, name: str, place: int) -> dict[str, Any]:
        self.kind, self.text, self.item_id = "function_call", "", uuid.uuid4().hex
        self.call_id, self.name, self.place = f"call_{uuid.uuid4().hex}", name, place
        return self._item("added", call_item(self.item_id, self.call_id, name, "", "in_progress"))

    def closed(self) -> Iterator[dict[str, Any]]:
        """The end of the item that is open, if one is."""
        if self.kind == "message":
            yield self._at("response.output_text.done", content_index=0, logprobs=[],
                           text=self.text)  # fmt: skip
            part: dict[str, Any] = {
                "annotations": [],
                "text": self.text,
                "type": "output_text",
                "logprobs": None,
            }
            yield self._at("response.content_part.done", content_index=0, part=part)
            done = message_item(self.item_id, "completed", [part])
            yield self._item("done", {**done, "summary": []})
        elif self.kind == "function_call":
            if self.text:
                yield self._at("response.function_call_arguments.done", arguments=self.text,
                               name=self.name)  # fmt: skip
            done = call_item(self.item_id, self.call_id, self.name, self.text, "completed")
            yield self._item("done", done)
        self.index += self.kind is not None
        self.kind = None
