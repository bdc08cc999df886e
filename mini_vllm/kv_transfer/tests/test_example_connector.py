"""Prompts in files, loaded in the step that needs them: hits, damage, and a plan in flight."""

from __future__ import annotations

import pytest

from mini_vllm import SamplingParams
from mini_vllm.kv_transfer.example import align_to_block_size
from mini_vllm.kv_transfer.pull import hash_of
from mini_vllm.kv_transfer.tests.support import alone, engine, transfer_of

PROMPT = (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5)


def made(folder, policy="fail", **knobs):
    return engine(
        kv_transfer_config={
            "kv_connector": "ExampleConnector", "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
        **knobs,
    )  # fmt: skip


def said(of, prompt=PROMPT, max_tokens=4):
    """The one completion of a prompt, whose K and V of this engine's own cache are not used."""
    of.reset_prefix_cache()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return of.generate([list(prompt)], params)[0].outputs[0]


def loaded(of):
    return transfer_of(of).stats()["num_external_tokens"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", range(1, 12))
def test_a_second_engine_loads_what_the_first_kept(tmp_path, length, ahead):
    prompt = PROMPT[:length]
    first, second = made(tmp_path), made(tmp_path, async_scheduling=ahead)
    assert said(first, prompt).token_ids == said(second, prompt).token_ids == alone(prompt, 4)
    kept, asked = align_to_block_size(length, 4), align_to_block_size(length - 1, 4)
    assert loaded(second) == (asked if kept == asked and length > 1 else 0)


def test_a_prompt_that_takes_several_steps_is_not_kept(tmp_path):
    first, second = made(tmp_path, max_num_batched_tokens=4), made(tmp_path)
    assert said(first).token_ids == said(second).token_ids == alone(PROMPT, 4)
    assert loaded(second) == 0


def damaged(tmp_path, layer=1):
    said(made(tmp_path))
    [folder] = tmp_path.iterdir()
    file = sorted(folder.iterdir())[layer]
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("max_tokens", [1, 2, 4])
@pytest.mark.parametrize("chunk", [0, 2, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_damaged_layer_is_computed_here(tmp_path, ahead, chunk, max_tokens):
    """Also with the next plan in flight, where the pin strands the request or keeps its token."""
    damaged(tmp_path)
    of = made(tmp_path, "recompute", async_scheduling=ahead, long_prefill_token_threshold=chunk)
    assert said(of, PROMPT, max_tokens).token_ids == alone(PROMPT, max_tokens)
    assert transfer_of(of).num_failed_loads == 1 and of.scheduler.kv.usage == 0.0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_damaged_layer_ends_its_request_alone(tmp_path, ahead):
    damaged(tmp_path)
    of = made(tmp_path, async_scheduling=ahead)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    both = of.generate([list(PROMPT), [6, 5, 4]], params)
    assert both[0].outputs[0].finish_reason == "error"
    assert "its checksum differs" in str(both[0].outputs[0].stop_reason)
    assert both[1].outputs[0].token_ids == alone((6, 5, 4), 4)
    assert of.scheduler.kv.usage == 0.0


def test_a_newcomer_does_not_read_a_block_whose_load_failed(tmp_path):
    damaged(tmp_path)
    of = made(tmp_path, "recompute", long_prefill_token_threshold=2)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    first = of.requests[of.add_request(list(PROMPT), params)]
    of.step()
    late = of.requests[of.add_request(list(PROMPT[:9]), params)]
    while of.has_unfinished_requests():
        of.step()
    assert first.output_token_ids == alone(PROMPT, 3)
    assert late.output_token_ids == alone(PROMPT[:9], 3)


def test_an_engine_that_kept_the_prompt_meanwhile_is_not_overwritten(tmp_path):
    of, theirs = made(tmp_path), tmp_path / hash_of(PROMPT[:8])

    def keeps(plan):
        theirs.mkdir(exist_ok=True)
        (theirs / "layer").write_bytes(b"of another engine")

    of.observers.append(keeps)
    assert said(of).token_ids == alone(PROMPT, 4)
    assert [*tmp_path.iterdir()] == [theirs] and [*theirs.iterdir()] == [theirs / "layer"]


def test_a_folder_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="shared_storage_path=5: need a folder"):
        engine(
            kv_transfer_config={
                "kv_connector": "ExampleConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": 5},
            }
        )  # fmt: skip
