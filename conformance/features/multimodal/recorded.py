"""What is recorded of pictures."""

from conformance.features import Part, run, workloads

PARTS: dict[str, Part] = {
    "encoder": workloads(
        "multimodal", "encoder", "record", "the same `Scheduler` with pictures, a budget, a cache"
    ),
    "encoder-dense": workloads(
        "multimodal",
        "encoder-dense",
        "record_dense",
        "the same, picture after picture, mostly under the priority policy",
    ),
    "encoder-async": workloads(
        "multimodal", "encoder-async", "record_async", "the same with `AsyncScheduler`"
    ),
    "texts-pictures": run(
        "texts-pictures",
        "features.multimodal.texts:recorded",
        "greedy answers about drawn pictures, chunks of 96 tokens",
        "`texts multimodal`",
    ),
}
