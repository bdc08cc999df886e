"""Answers that are errors, and fields that are wrong. Mirrors `vllm/entrypoints/utils.py:347`
`create_error_response`."""

from __future__ import annotations

from typing import Any


class APIError(Exception):
    """An answer that is an error: status, `type`, `param` and a message."""

    def __init__(
        self, message: str, kind: str = "BadRequestError", status: int = 400,
        param: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message, self.kind, self.status, self.param = message, kind, status, param

    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        error = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": error | {"code": self.status}}


class FieldError(ValueError):
    """A wrong body; `param` is what vLLM's answer names."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
