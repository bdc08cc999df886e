"""Sweeps on a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import pytest

from mini_vllm.simulate.report import Slo
from mini_vllm.simulate.sweep import sweep
from mini_vllm.simulate.tests.test_sweep import SETUP

ray = pytest.importorskip("ray", reason="ray is not installed (pip install -e '.[ray]')")
pytestmark = pytest.mark.slow
AXES = {"max_num_batched_tokens": [512, 1024, 2048], "speed": [1, 2, 4, 8]}
SLO = Slo(ttft=0.05)


@pytest.fixture
def cluster():
    """A head with no processor for work, and two nodes with one each."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    found.workers = [found.add_node(num_cpus=1) for _ in range(2)]
    try:
        yield found
    finally:
        found.shutdown()


def test_the_table_is_the_same_and_a_machine_that_dies_loses_nothing(cluster, tmp_path):
    alone = sweep(SETUP, AXES, SLO)
    assert sweep(SETUP, AXES, SLO, ray=cluster.address) == alone
    rows = []

    def kill_one(row):
        rows.append(row)
        if len(rows) == 2:  # the first is made here, the second by a node
            cluster.remove_node(cluster.workers[0], allow_graceful=False)

    state = tmp_path / "state.jsonl"
    assert sweep(SETUP, AXES, SLO, ray=cluster.address, on_row=kill_one, state=state) == alone
    assert len(rows) == len(alone) == len(state.read_text().splitlines())


def test_without_a_cluster_there_it_says_so():
    for address in ("127.0.0.1:1", "127.0.0.1:x"):
        with pytest.raises(ValueError, match=rf"--ray {address}: no cluster answers"):
            sweep(SETUP, AXES, SLO, ray=address)
