"""A small checkpoint that sees, and what its engine answers alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.tests.multimodal_support import picture, prompt, write_llava

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
PICTURES = [picture(seed) for seed in range(3)]
PROMPTS = [
    prompt("what ", PICTURES[0], " and ", PICTURES[1], "?"),
    prompt(PICTURES[1], "is it ", PICTURES[2]),
    prompt("again ", PICTURES[0], PICTURES[0]),
    prompt("nothing to see"),
]


def config(role: str, connector: str = "ECSocketConnector", **more: Any) -> dict[str, Any]:
    extra = {name: more.pop(name) for name in list(more) if not name.startswith("ec_")}
    return {
        "ec_connector": connector, "ec_role": role, **more, "ec_connector_extra_config": extra,
    }  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("encoding") / "model")


@pytest.fixture(scope="session")
def alone(folder: Path) -> list[list[int]]:
    """The tokens of one engine, float64: rows that travel must change none of them."""
    return answers(LLMEngine(folder, dtype="float64"))


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., LLMEngine]]:
    """What makes engines, and closes them: not a thread is left."""
    before, opened = set(threading.enumerate()), list[LLMEngine]()

    def make(ec_transfer_config: Any, **knobs: Any) -> LLMEngine:
        opened.append(
            LLMEngine(folder, dtype="float64", ec_transfer_config=ec_transfer_config, **knobs)
        )
        return opened[-1]

    yield make
    for of in opened:
        of.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), thread.name


def answers(
    of: LLMEngine, prompts: Sequence[Any] = PROMPTS, params: SamplingParams = PARAMS
) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in of.generate(prompts, params)]


def room_of(of: LLMEngine) -> Any:
    return of.feature("multimodal")
