"""What is recorded of ranks, stages and replicas."""

from conformance.features import cases, run, workloads

PARTS = {
    "pipeline": workloads(
        "distributed", "pipeline", "record",
        "the same `Scheduler` with two, three and four batches in flight",
    ),
    "balancer": cases(
        "distributed", "balancer",
        "`vllm/v1/engine/core_client.py:1382` `DPLBAsyncMPClient.get_core_engine_for_request`, 40 "
        "events",
        "`LoadBalancer`",
    ),
    "coordinator": cases(
        "distributed", "coordinator",
        "`vllm/v1/engine/coordinator.py:187` `DPCoordinatorProc.process_input_socket`, 30 events, "
        "sockets and clock scripted",
        "`Coordinator`",
    ),
    "tp_shards": cases(
        "distributed", "tp_shards",
        "`vllm/model_executor/layers/linear.py:1139` `QKVParallelLinear.weight_loader_v2` and its "
        "three neighbours, rank by rank; partial results of `RowParallelLinear.forward`",
        "lab 10-01",
    ),
    "pp_layers": cases(
        "distributed", "pp_layers",
        "`vllm/distributed/utils.py:95` `get_pp_indices`, every stage", "lab 10-04",
    ),
    "all_reduce_choice": cases(
        "distributed", "all_reduce_choice",
        "`vllm/distributed/device_communicators/custom_all_reduce.py:232` "
        "`CustomAllreduce.should_custom_ar`, and the header's choice of a kernel, compiled",
        "lab 10-03",
    ),
    **{
        f"ranks-{name}": run(
            f"ranks-{name}", "features.distributed.texts:recorded",
            f"greedy texts of 64 prompts on {what}", "`texts distributed`", run=name,
        )
        for name, what in (
            ("one", "one rank, and what it holds"),
            ("tp2", "two tensor ranks, and what each holds"),
            ("pp2", "two pipeline ranks, and what each holds"),
            ("dp2", "two engines behind one server, and which took what"),
            ("moe-one", "one rank, with experts"),
            ("moe-tp2", "two tensor ranks, with experts"),
        )
    },
}  # fmt: skip
