"""What vLLM's server answers to `battery_apis.py`: recorded.

    course engine run -m conformance.record apis                 # the real engine

As `recorded.py`, with the same flags. Two servers are started: one as it is, and one with
`VLLM_ENABLE_RESPONSES_API_STORE=1`. The first one's `/openapi.json` is kept too: its routes, and
the required fields of the bodies.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.serving.battery import Ask
from conformance.serving.battery_apis import asks, stored
from conformance.serving.recorded import real_server, send

KEPT = Path(__file__).parents[1] / "recordings" / "engine" / "serving-apis.jsonl.gz"
ABOUT = (
    '`{"name", "status", "type", "body"}` of each request of `battery_apis.py`, in its order; of a '
    'stream `"events"`, each `{"event", "data"}`, instead of a body; last `{"openapi"}`: each '
    "route's methods, and the required fields of the body of each."
)


def surface(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of an OpenAPI document: per path and method the required fields of the body, None without."""
    schemas = document["components"]["schemas"]
    found: dict[str, dict[str, Any]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody")
            needed = None
            if body is not None and "application/json" in body["content"]:
                schema = body["content"]["application/json"]["schema"]
                named = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
                needed = sorted(named.get("required", []))
            found.setdefault(path, {})[method] = needed
    return found


def recorded() -> Iterator[dict[str, Any]]:
    """Every answer of the real servers, one after the other."""
    from conformance.real_engine import provenance

    yield {"machine": provenance("float32")}
    with real_server() as port:
        for ask in asks():
            yield send(port, ask)
        document = send(port, Ask("openapi", "/openapi.json", method="GET", key=None))["body"]
    with real_server(VLLM_ENABLE_RESPONSES_API_STORE="1") as port:
        for ask in stored():
            yield send(port, ask)
    yield {"openapi": surface(document)}
