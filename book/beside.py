"""The pages' Python, answered by this process: for tests of what a page does with an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

BESIDE = """
    const beside = {
        ready: true,
        session: () => (window.theSession ||= {
            state: "ready", calls: [], onprogress: null,
            async call(kind, payload) {
                this.calls.push(payload.function);
                const answer = JSON.parse(await window.__python(JSON.stringify(payload)));
                if ("error" in answer) throw new Error(answer.error);
                return answer.result;
            },
            stop() {},
        }),
    };
    Object.defineProperty(window, "CoursePlay", { get: () => beside, set: () => {} });
"""
"""The contract of the page's runtime."""


def beside(module: ModuleType) -> Callable[[Any], None]:
    """What prepares a page so that `module`'s functions answer it."""

    def answer(text: str) -> str:
        call = json.loads(text)
        assert call["module"] == module.__name__
        try:
            return json.dumps({"result": getattr(module, call["function"])(**call["arguments"])})
        except ValueError as error:
            return json.dumps({"error": f"ValueError: {error}"})

    def prepare(page: Any) -> None:
        page.expose_function("__python", answer)
        page.add_init_script(BESIDE)

    return prepare
