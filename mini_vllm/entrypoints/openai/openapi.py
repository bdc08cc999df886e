"""`/openapi.json`: what the server takes and answers, for tools that read it.

Promises: what is taken is the models that check it (`protocol.py`), so the two cannot differ; what
is answered names the fields that every answer has. Stands where FastAPI makes it for
`vllm/entrypoints/openai/api_server.py:157` `build_app`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

Fields = dict[str, Any]

TEXT: Fields = {"type": "string"}
NUMBER: Fields = {"type": "integer"}
LIST: Fields = {"type": "array"}
OBJECT: Fields = {"type": "object"}


def answer(**fields: Fields) -> Fields:
    """The schema of an object that has these fields, and perhaps more."""
    return {"type": "object", "properties": fields, "required": list(fields)}


ERROR = answer(
    error=answer(message=TEXT, type=TEXT, param={"type": ["string", "null"]}, code=NUMBER)
)
MESSAGES_ERROR = answer(type=TEXT, error=answer(type=TEXT, message=TEXT))
GENERATED = answer(
    id=TEXT, object=TEXT, created=NUMBER, model=TEXT, choices={"type": "array", "items": OBJECT},
    usage=answer(prompt_tokens=NUMBER, total_tokens=NUMBER, completion_tokens=NUMBER),
)  # fmt: skip
RENDERED = answer(request_id=TEXT, token_ids=LIST, sampling_params=OBJECT)
MODELS = answer(object=TEXT, data={"type": "array", "items": answer(id=TEXT, max_model_len={})})
TOKENS = answer(count=NUMBER, max_model_len=NUMBER, tokens={"type": "array", "items": NUMBER})

REFUSALS = {
    400: "a field is wrong", 404: "no such model", 408: "the body took too long",
    413: "the body is too large", 429: "too many requests at once", 500: "the engine has ended",
    501: "not available",
}  # fmt: skip


def _json(schema: Fields) -> Fields:
    return {"application/json": {"schema": schema}}


def operation(
    what: str, answered: Fields | None, taken: type[BaseModel] | None = None, streams: bool = False
) -> Fields:  # fmt: skip
    """One operation: its summary, its body's model, the schema of its answer."""
    content = {} if answered is None else _json(answered)
    if streams:
        content["text/event-stream"] = {"schema": {"type": ["string", "object"]}}  # named or not
    responses: Fields = {"200": {"description": "the answer"}}
    if content:
        responses["200"]["content"] = content
    found: Fields = {"summary": what, "responses": responses}
    if names := re.findall(r"{(\w+)}", what):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": TEXT} for name in names
        ]
        responses["404"] = {"description": "no such response", "content": _json(ERROR)}
        responses["400"] = {"description": "it cannot be cancelled", "content": _json(ERROR)}
    if taken is not None:
        reference = {"$ref": f"#/components/schemas/{taken.__name__}"}
        found["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": reference}}
        }  # fmt: skip
        error = {
            "application/json": {"schema": {"anyOf": [ERROR, MESSAGES_ERROR, answer(detail=TEXT)]}}
        }
        for status, reason in REFUSALS.items():
            responses[str(status)] = {"description": reason, "content": error}
    return found


def document(
    version: str, operations: Sequence[tuple[str, str, Fields]], models: Sequence[type[BaseModel]]
) -> Fields:  # fmt: skip
    """The document.

    Args:
        version: of the server.
        operations: path, method and `operation(...)` of each.
        models: those of the bodies.
    """
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Fields] = {}
    for path, method, found in operations:
        paths.setdefault(path, {})[method] = found
    return {
        "openapi": "3.1.0", "info": {"title": "mini-vllm", "version": version}, "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }  # fmt: skip
