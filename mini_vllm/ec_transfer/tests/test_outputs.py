"""Whatever brings the rows of a picture, and whenever: the tokens are those of one engine."""

from __future__ import annotations

import random

import pytest

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.ec_transfer.base import (
    ECConnectorBase,
    ECConnectorRole,
    ECTransfer,
    LoadError,
    RowsOf,
)
from mini_vllm.ec_transfer.config import ECTransferConfig
from mini_vllm.ec_transfer.tests.conftest import PROMPTS, answers, config, room_of
from mini_vllm.multimodal.hasher import hash_picture

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


@pytest.mark.parametrize("connector", ["ECExampleConnector", "ECSocketConnector"])
def test_an_engine_that_encodes_and_one_that_decodes_say_what_one_engine_says(
    connector, engine, alone, tmp_path
):
    more = {"shared_storage_path": str(tmp_path)} if connector == "ECExampleConnector" else {}
    producer = engine(config("ec_producer", connector, ec_port=0, **more))
    assert answers(producer, params=ONE) == [[0]] * len(PROMPTS)
    port = (room_of(producer).ec_transfer.address or ("", 14579))[1]
    consumer = engine(config("ec_consumer", connector, ec_port=port, **more))
    assert answers(consumer) == alone
    found, kept = room_of(consumer).stats(), room_of(producer).stats()
    assert (found["ec_loads"], found["ec_saves"], found["encoder_runs"]) == (3, 0, 0)
    assert (kept["ec_loads"], kept["ec_saves"], kept["encoder_runs"]) == (0, 3, 3)
    assert producer.scheduler.kv.usage == consumer.scheduler.kv.usage == 0.0
    assert producer.runner.kv_cache is None


class Late(ECConnectorBase):
    """Both halves: by picture, from which question on its rows are there, and how loads end."""

    def __init__(self, rows, plan):
        made = ECTransferConfig("Late", "ec_consumer")
        any_rows = next(iter(rows.values()))
        rows_of = RowsOf(any_rows.shape[1], any_rows.dtype)
        super().__init__(made, ECConnectorRole.WORKER, rows_of)
        self.rows, self.plan, self.asked = rows, plan, dict.fromkeys(rows, 0)

    def has_cache_item(self, identifier):
        begins, ends, _ = self.plan[identifier]
        self.asked[identifier] += 1
        return begins <= self.asked[identifier] <= ends

    def load(self, mm_data):
        if not self.plan[mm_data.mm_hash][2]:
            raise LoadError("gone")
        return self.checked(self.rows[mm_data.mm_hash], mm_data)

    def save(self, mm_hash, rows):
        raise AssertionError("a consumer saves nothing")


@pytest.fixture(scope="module")
def rows(folder):
    """The rows of every picture of `PROMPTS`."""
    made = LLMEngine(folder, dtype="float64")
    answers(made)
    return dict(room_of(made).runner.encoder_cache)


def decoded(folder, rows, plan, **knobs):
    made = LLMEngine(
        folder, dtype="float64", ec_transfer_config=config("ec_consumer"), **knobs
    )  # its connector is never asked
    half = Late(rows, plan)
    room_of(made).connect(ECTransfer(half, half))
    return made, half


def outcome(folder, alone, rows, begins, lasts, comes):
    """Whether something was loaded, and whether a load failed; the tokens are those of one engine.

    The rows of each picture are there from the question `begins` on, `lasts` questions longer; then
    a load does what `comes` says.
    """
    plan = dict.fromkeys(rows, (begins, begins + lasts, comes))
    made, half = decoded(folder, rows, plan, encoder_cache_size=4)
    assert answers(made) == alone, (begins, lasts, comes)
    assert not (half.num_failed_loads if comes else half.num_loads)
    return half.num_loads > 0, half.num_failed_loads > 0


def test_the_tokens_are_the_same_if_rows_come_late_or_not_at_all(folder, alone, rows):
    assert outcome(folder, alone, rows, 2, 99, True) == (True, False)
    assert outcome(folder, alone, rows, 1, 99, False) == (False, True)


@pytest.mark.slow
@pytest.mark.parametrize("lasts", [0, 1, 99])  # gone before it is noted, before the next, never
@pytest.mark.parametrize("comes", [True, False])
def test_the_tokens_are_the_same_for_every_delay(lasts, comes, folder, alone, rows):
    for begins in range(1, 7):
        outcome(folder, alone, rows, begins, lasts, comes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_the_tokens_are_the_same_in_random_engines(seed, folder, alone, rows):
    rng = random.Random(seed)
    size = rng.choice((2, 4, 8))
    plan = {
        mm_hash: (first := rng.randint(1, 9), first + rng.choice((0, 1, 4, 99)), rng.random() < 0.7)
        for mm_hash in rows
    }
    made, _ = decoded(
        folder, rows, plan, block_size=size, num_blocks=2 + rng.choice((40, 80)) // size,
        enable_prefix_caching=rng.random() < 0.8, async_scheduling=rng.random() < 0.4,
        policy=rng.choice(("fcfs", "priority")), max_num_batched_tokens=rng.choice((4, 7, 16, 64)),
        max_num_encoder_input_tokens=4 + rng.choice((0, 3)),
        encoder_cache_size=4 + rng.choice((0, 4, 20)), forget_withdrawn_blocks=True,
    )  # fmt: skip
    assert answers(made) == alone


def test_a_file_has_the_place_and_the_names_that_the_pins_connector_gives_it(
    engine, tmp_path, rows
):
    from safetensors.numpy import load_file

    from mini_vllm.ec_transfer.tests.conftest import PICTURES

    producer = engine(
        config("ec_producer", "ECExampleConnector", shared_storage_path=str(tmp_path))
    )
    answers(producer, params=ONE)
    name = hash_picture(PICTURES[0])
    assert [path.name for path in (tmp_path / name).iterdir()] == ["encoder_cache.safetensors"]
    (tensors,) = load_file(tmp_path / name / "encoder_cache.safetensors").items()
    assert tensors[0] == "ec_cache" and (tensors[1] == rows[name]).all()
