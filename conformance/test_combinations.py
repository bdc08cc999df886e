"""Features together equal each request alone; and what goes wrong between two of them is found."""

from __future__ import annotations

import pytest

from conformance import combinations
from mini_vllm import LLMEngine, SamplingParams, kv_cache
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.lora import adapters
from mini_vllm.row_sampler import RowSampler


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return combinations.Folders(tmp_path_factory.mktemp("combinations"))


@pytest.mark.slow
def test_requests_among_others_with_features_answer_as_they_do_alone(folders):
    tally = combinations.run(range(15), folders)
    assert tally.different == {} and tally.num_workloads > 9


@pytest.mark.slow
def test_many_random_combinations_differ_nowhere(folders):
    """Thousands: `python -m conformance.combinations --seed 1000 --count 20000`."""
    tally = combinations.run(range(1_000, 1_150), folders)
    assert tally.different == {} and tally.num_workloads > 112


def test_nearly_every_token_of_a_prompt_changes_the_answer_of_the_models():
    """Else a wrong block would not show."""
    for kind in ("dense", "moe"):
        engine = LLMEngine(combinations.model(kind), dtype="float64", num_blocks=64)
        base = list(b"abcdefghijkl")
        prompts = [base, *([*base[:i], 65, *base[i + 1 :]] for i in range(len(base)))]
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        answers = {tuple(o.outputs[0].token_ids) for o in engine.generate(prompts, params)}
        assert len(answers) >= 9


def test_a_seed_stands_for_one_workload(folders):
    assert combinations.workload(3, folders) == combinations.workload(3, folders)
    assert len({repr(combinations.workload(s, folders)) for s in range(20)}) == 20


def _shares_blocks_between_adapters(monkeypatch):
    monkeypatch.setattr(
        adapters, "check_extra_keys", lambda *parts: None
    )  # it would say so at once
    monkeypatch.setattr(kv_cache, "root_hash", lambda extra_keys: 0)


def _loses_a_block(monkeypatch):
    free = KVCacheManager.free

    def leaky(self, request):
        table = self.req_to_blocks.get(request.request_id)
        if table and request.num_preemptions:
            table.pop()
        free(self, request)

    monkeypatch.setattr(KVCacheManager, "free", leaky)


def _keeps_a_name(monkeypatch):
    remove_request = RowSampler.remove_request
    kept = []

    def reluctant(self, request_id):
        self.kept = kept
        kept.append(request_id)
        remove_request(self, request_id)

    monkeypatch.setattr(RowSampler, "remove_request", reluctant)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seeds"),
    [
        (_shares_blocks_between_adapters, range(200)),
        (_loses_a_block, range(200)),
        (_keeps_a_name, range(3)),
    ],
)
def test_a_planted_fault_is_found(fault, seeds, folders, monkeypatch):
    fault(monkeypatch)
    for seed in seeds:
        if combinations.run(range(seed, seed + 1), folders).different:
            return
    pytest.fail("no workload shows it")
