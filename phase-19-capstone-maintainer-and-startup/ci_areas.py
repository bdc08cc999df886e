"""What of upstream's CI configuration lab 19-01 reads: which step asks for which paths.

    python phase-19-capstone-maintainer-and-startup/ci_areas.py

Reads the pinned tree's `.buildkite/ci_config.yaml` and `.buildkite/test_areas/*.yaml`; labels,
path prefixes, `optional` and `device` are kept, commands are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.yaml_files import read_yaml

HERE = Path(__file__).resolve().parent
BUILDKITE = HERE.parent / "upstream" / ".buildkite"
FILE = HERE / "labs" / "lab-01-find-and-scope-a-pr" / "recordings" / "areas.json"


def areas(folder: Path = BUILDKITE) -> dict[str, Any]:
    """The patterns that run everything, and every labelled step of the test areas."""
    config = read_yaml((folder / "ci_config.yaml").read_text(encoding="utf-8"))
    steps = []
    for path in sorted((folder / "test_areas").glob("*.yaml")):
        for step in read_yaml(path.read_text(encoding="utf-8"))["steps"]:
            if "label" not in step:
                continue
            kept = {"label": step["label"], "file": path.name}
            for key in ("source_file_dependencies", "device"):
                if key in step:
                    kept[key] = step[key]
            steps.append({**kept, "optional": bool(step.get("optional"))})
    patterns = ("run_all_patterns", "run_all_exclude_patterns")
    return {**{name: config[name] for name in patterns}, "steps": steps}


def text(found: dict[str, Any]) -> str:
    """As the file has it: a line per step."""
    head = {name: value for name, value in found.items() if name != "steps"}
    lines = ",\n".join(json.dumps(step) for step in found["steps"])
    return f'{json.dumps(head)[:-1]}, "steps": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    FILE.write_text(text(areas()), encoding="utf-8")
