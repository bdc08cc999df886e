"""Two real engines that share K and V through files: texts, and where prompt tokens came from."""

from __future__ import annotations

import pytest

from conformance.features.kv_transfer import texts

SOURCE = "vllm:prompt_tokens_by_source"
BY_TOKENS = "texts-example-connector-by-tokens"


def test_as_many_tokens_came_from_files_as_the_prompts_say():
    found = texts.kept()
    predicted = sum(texts.predicted(found["prompts"], found["block_size"]))
    assert predicted == 256
    for counters in (
        found["consumer"]["counters"],
        texts.kept(BY_TOKENS)["consumer_by_tokens"]["counters"],
    ):
        assert counters["vllm:external_prefix_cache_hits"] == predicted
        assert counters[f"{SOURCE}external_kv_transfer"] == predicted
        assert counters[f"{SOURCE}local_compute"] == sum(map(len, found["prompts"])) - predicted
    kept = {tuple(p[: texts.align_to_block_size(len(p), 16)]) for p in found["prompts"]}
    assert () in kept  # prompts of at most a block: the connector makes a folder of no tokens, too
    assert found["files"] == [4] * len(kept)  # a file for each layer


def test_with_its_axes_in_order_the_connector_changes_no_text_and_without_one_of_ten():
    alone = texts.kept()["alone"]["outputs"]
    assert texts.kept(BY_TOKENS)["consumer_by_tokens"]["outputs"] == alone
    plain = texts.kept()["consumer"]["outputs"]
    assert sum(mine != theirs for mine, theirs in zip(alone, plain, strict=True)) == 1


@pytest.mark.slow
def test_two_engines_of_ours_say_and_load_the_same(tmp_path):
    ours = texts.mini(texts.kept(), str(tmp_path))
    assert ours == {"outputs": texts.kept()["alone"]["outputs"], "loaded": 256}
