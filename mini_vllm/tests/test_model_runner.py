"""From a plan to a ragged batch: worked values and agreement with plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm.attention.paged import PagedMetadata
from mini_vllm.batch import ForwardBatch
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.model_runner import ModelRunner
from mini_vllm.plan import SchedulerOutput
from mini_vllm.tests.support import Moment, Scenario, drive, for_scenarios


class Capture:
    """A model that keeps the batches it is given."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.batches: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        self.batches.append(batch)
        return self.inner.forward(batch)


def test_two_requests_laid_end_to_end():
    """Budget 8, blocks of 4: A's 6 prompt tokens, then 2 of B's 5; in step 2 A decodes."""
    engine = LLMEngine(
        num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=8, model="toy"
    )
    capture = engine.model = Capture(engine.model)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for prompt in ([10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24]):
        engine.add_request(prompt, params)
    engine.step()
    engine.step()
    first, second = capture.batches
    assert first.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 20, 21]
    assert first.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert first.block_tables.tolist() == [[1, 2], [3, 0]]
    assert first.slot_mapping.tolist() == [4, 5, 6, 7, 8, 9, 12, 13]
    assert first.query_start_loc.tolist() == [0, 6, 8]
    assert first.seq_lens.tolist() == [6, 2]
    assert first.logits_indices.tolist() == [5, 7]
    assert second.positions.tolist() == [6, 2, 3, 4]
    assert second.token_ids.tolist()[1:] == [22, 23, 24]
    assert second.slot_mapping.tolist() == [10, 14, 15, 16]
    assert second.seq_lens.tolist() == [7, 5]


@pytest.mark.slow
@for_scenarios(60)
def test_every_batch_agrees_with_the_requests_it_was_made_of(scenario: Scenario):
    engine = scenario.engine()
    capture = engine.model = Capture(engine.model)
    expected: list[tuple[list[int], list[int], list[int]]] = []

    def check(moment: Moment) -> None:
        if moment.phase == "scheduled" and moment.output.scheduled_requests:
            tokens, positions, slots = [], [], []
            for request in moment.output.scheduled_requests:
                table = moment.kv.get_block_ids(request.request_id)
                start = request.num_computed_tokens
                count = moment.output.num_scheduled_tokens[request.request_id]
                for position in range(start, start + count):
                    tokens.append(request.all_token_ids[position])
                    positions.append(position)
                    block, offset = divmod(position, scenario.block_size)
                    slots.append(table[block] * scenario.block_size + offset)
            expected.append((tokens, positions, slots))

    drive(scenario, check, engine)
    got = [
        (b.token_ids.tolist(), b.positions.tolist(), b.slot_mapping.tolist())
        for b in capture.batches
    ]
    assert got == expected
    for batch in capture.batches:
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping)
        assert batch.slot_mapping.min() >= scenario.block_size, "wrote into the null block"


def test_a_batch_splits_its_rows_into_decodes_and_prefills():
    batch = ForwardBatch(
        token_ids=np.zeros(24, dtype=np.int64),
        positions=np.array([4, *range(20), 9, 2, 3]),
        slot_mapping=np.arange(24),
        query_start_loc=np.array([0, 1, 21, 22, 24]),
        seq_lens=np.array([5, 20, 10, 4]),
        block_tables=np.arange(20).reshape(4, 5),
        logits_indices=np.array([0, 20, 21, 22, 23]),
        block_size=4,
    )
    metadata = PagedMetadata.of(batch)
    assert metadata is PagedMetadata.of(batch), "worked out once per batch"
    assert metadata.prefill_rows == [1]
    groups = sorted(group.token_rows.tolist() for group in metadata.decode_groups)
    assert groups == [[[0]], [[21]], [[22, 23]]], "one with a draft has a group of its own"


def test_drafts_get_a_row_of_logits_each():
    """The batch of `vllm/v1/worker/gpu_model_runner.py:2713`
    `GPUModelRunner._calc_spec_decode_metadata`'s own example, in the rows it samples from."""
    plan = SchedulerOutput()
    for name, count, drafts in (
        ("a", 4, 3),
        ("b", 100, 0),
        ("c", 3, 2),
        ("d", 100, 0),
        ("e", 2, 1),
    ):
        plan.num_scheduled_tokens[name] = count
        if drafts:
            plan.spec_token_ids[name] = [7] * drafts
    last = np.cumsum([4, 100, 3, 100, 2]) - 1
    rows = ModelRunner._logits_indices(plan, last).tolist()
    assert rows == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
