"""What is recorded of pictures."""

from conformance.features import Part, run, workloads

PARTS: dict[str, Part] = {
    "encoder": workloads(
        "multimodal", "encoder", "record", "the same `Scheduler` with pictures, a budget, a cache"
    ),
    "encoder_dense": workloads(
        "multimodal",
        "encoder_dense",
        "record_dense",
        "the same, picture after picture, mostly under the priority policy",
    ),
    "encoder_async": workloads(
        "multimodal", "encoder_async", "record_async", "the same with `AsyncScheduler`"
    ),
    "encoder_ec": workloads(
        "multimodal",
        "encoder_ec",
        "record_ec",
        "the same with the scheduler's half of the pin's `ECExampleConnector`, its files scripted",
    ),
    "texts-pictures": run(
        "texts-pictures",
        "features.multimodal.texts:recorded",
        "greedy answers about drawn pictures, chunks of 96 tokens",
        "`texts multimodal`",
    ),
    "texts-ec-connector": run(
        "texts-ec-connector",
        "features.multimodal.ec_texts:recorded",
        "the same questions, where vLLM decodes what our tower encoded",
        "`features.multimodal.ec_texts`",
    ),
    "texts-ec-producer": run(
        "texts-ec-producer",
        "features.multimodal.ec_texts:recorded_producer",
        "rows that vLLM's own `ec_producer` saved, from which ours answers",
        "`test_ec_transfer.py`",
    ),
}
