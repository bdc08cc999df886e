"""From the bytes of a body to a request, or a refusal.

Promises: what a body may hold is bounded before anything is made of it: its bytes, how many values
its JSON has, how many answers it asks for; so the largest one costs a part of a second, on a thread
that is not the server's. Stands where FastAPI reads a body for
`vllm/entrypoints/openai/completion/api_router.py:46` `create_completion`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from mini_vllm.entrypoints.openai.errors import APIError, FieldError

MAX_BODY_BYTES = 4 * 2**20
MAX_VALUES = 2**18
"""Values in the JSON of a body; a prompt may be as many token ids."""
MAX_COMPLETIONS = 1024
"""Prompts times `n` of one body."""
MAX_TEXTS = 1024
"""Entries of `stop` and of `bad_words`, each of which every new text is searched for."""

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"')
_HALF_PAIRS = re.compile(rb"\\u[dD][89a-fA-F]")


def parsed(content: bytes) -> dict[str, Any]:
    """The object in a body.

    Raises:
        APIError: it is not a JSON object, or holds too much.
        HTTPException: it is not text.
    """
    if _num_values(content) > MAX_VALUES and _num_values(_STRINGS.sub(b"", content)) > MAX_VALUES:
        raise APIError(f"body: need at most {MAX_VALUES} values in it", "Bad Request")
    try:
        found = json.loads(content)
    except UnicodeDecodeError:  # FastAPI's own answer, and its shape
        raise HTTPException(400, "There was an error parsing the body") from None
    except (ValueError, RecursionError) as error:
        raise APIError(f"body: not JSON: {error}", "Bad Request") from None
    if not isinstance(found, dict):
        raise APIError(f"body: need an object, not a {type(found).__name__}", "Bad Request")
    if _HALF_PAIRS.search(content):
        _check_pairs(found)
    _check_sizes(found)
    return found


def _num_values(content: bytes) -> int:
    """At least as many as the JSON has, without reading it."""
    return content.count(b",") + content.count(b"[") + content.count(b"{")


def _check_pairs(found: dict[str, Any]) -> None:
    """Refuse half a surrogate pair: no text of an answer could repeat it."""
    for name, value in found.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            shown = name.encode("ascii", "backslashreplace").decode()
            raise APIError(f"{shown}: holds half of a surrogate pair", param=shown) from None


def _check_sizes(found: dict[str, Any]) -> None:
    """Refuse what is within bounds one by one and too much together."""
    prompt, n = found.get("prompt"), found.get("n")
    num_prompts = len(prompt) if isinstance(prompt, list) and not _is_ids(prompt) else 1
    num_each = n if isinstance(n, int) and n > 1 else 1
    if num_prompts * num_each > MAX_COMPLETIONS:
        given = f"{num_prompts} prompts, n={num_each}"
        raise APIError(
            f"prompt: {given}: need at most {MAX_COMPLETIONS} completions in one request",
            param="prompt" if num_prompts > 1 else "n",
        )
    for name in ("stop", "bad_words"):
        texts = found.get(name)
        if isinstance(texts, list) and len(texts) > MAX_TEXTS:
            raise APIError(f"{name}: {len(texts)} texts, need at most {MAX_TEXTS}", param=name)


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def checked(model: type[BaseModel], body: Any) -> Any:
    """The body as a request.

    Raises:
        APIError: a field is wrong; each is named.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        wrong = [
            ".".join(map(str, e["loc"])) + (": " if e["loc"] else "") + e["msg"]
            for e in error.errors(include_url=False, include_input=False, include_context=False)
        ]
        causes = [e.get("ctx", {}).get("error") for e in error.errors(include_url=False)]
        param = next((cause.param for cause in causes if isinstance(cause, FieldError)), None)
        raise APIError("; ".join(wrong[:MOST_NAMED]), "Bad Request", param=param) from None
    except RecursionError:
        raise APIError("body: nested too deeply", "Bad Request") from None


MOST_NAMED = 20
"""Wrong values that one answer names."""
