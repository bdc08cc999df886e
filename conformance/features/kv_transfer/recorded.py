"""What is recorded of connectors."""

from conformance.features import Part, cases, run, workloads

PARTS: dict[str, Part] = {
    "connector": workloads(
        "kv_transfer",
        "connector",
        "record",
        "the same `Scheduler` with a connector: loads and sends of some steps",
    ),
    "connector_failures": workloads(
        "kv_transfer",
        "connector_failures",
        "record_failures",
        "the same, loads that fail, under both policies",
    ),
    "connector_async": workloads(
        "kv_transfer", "connector_async", "record_async", "the same with `AsyncScheduler`"
    ),
    "kv_events": Part(
        "kv_events.jsonl.gz",
        "features.kv_transfer.kv_events:record",
        "what `vllm/v1/core/block_pool.py:130` `BlockPool` tells of its index, step by step",
        "`replay`",
        "workloads",
        "scheduler",
        takes_seeds=True,
    ),
    "offloading": Part(
        "installed/offloading.jsonl.gz",
        "features.kv_transfer.offloading:record",
        "the same with the scheduler's half of `OffloadingConnector` and `CPUOffloadingManager`",
        "`replay`",
        "workloads",
        "installed",
    ),
    "nixl_pair": cases(
        "kv_transfer",
        "nixl_pair",
        "two `Scheduler` with the scheduler's half of `NixlConnector`, and what goes wrong between",
        "`test_nixl_pair.py`",
    ),
    "connector_deaths": Part(
        "deaths/connector.jsonl.gz",
        "features.kv_transfer.recorder:record_deaths",
        "workloads that `Scheduler` does not survive: an assertion of its own",
        "`test_kv_transfer.py`",
        "workloads",
        "scheduler",
        takes_seeds=True,
    ),
    "texts-example-connector": run(
        "texts-example-connector",
        "features.kv_transfer.texts:recorded",
        "greedy texts of two engines that share K and V by the pin's `ExampleConnector`",
        "`texts kv_transfer`",
    ),
    "texts-example-connector-by-tokens": run(
        "texts-example-connector-by-tokens",
        "features.kv_transfer.texts:recorded",
        "the same with the axes of a processor's cache in the order that it expects",
        "`texts kv_transfer`",
        by_tokens=True,
    ),
}
