"""vLLM's scores on the standard workloads, from vLLM's own code: `recorded.json`.

    PYTHONPATH=upstream python -m course.challenges.record

Needs torch and the pinned tree. A meter's `real()` gives what counts in the tree's own classes;
where it has none, its `vllm` runs `mini_vllm`'s scheduler, which the recordings hold to vLLM's.
"""

from __future__ import annotations

import json
from typing import Any

from course.challenges import judge
from course.files import write_atomically


def scores(challenge: judge.Challenge) -> list[dict[str, Any]]:
    """Of each standard workload its digest and vLLM's score."""
    meter: Any = challenge.meter
    count = meter.real() if hasattr(meter, "real") else meter.vllm
    found = []
    for seed in judge.seeds(challenge):
        load = meter.workload(seed)
        found.append({"digest": judge.digest(load), "vllm": count(load)})
    return found


def main() -> None:
    """Write `recorded.json` beside this file."""
    kept = {challenge.name: scores(challenge) for challenge in judge.every()}
    write_atomically(judge.HERE / "recorded.json", json.dumps(kept, indent=1) + "\n")
    for name, each in kept.items():
        print(f"{name}: {sum(one['vllm'] for one in each):,}")


if __name__ == "__main__":
    main()
