"""The three numbers on the first page, counted from what proves them.

Run `python -m course.truth.proofs` to write them into README. Promises: no number there is typed;
what grows daily is rounded down to hundreds, so that the page says no more than is there.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from course.learning import labs
from course.truth import citations, links

ROOT = Path(__file__).resolve().parents[2]


def recorded(root: Path = ROOT) -> tuple[int, int]:
    """Workloads and steps of the recordings of the real scheduler, all of which are replayed."""
    workloads = steps = 0
    for path in sorted((root / "conformance" / "recordings").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                workloads += 1
                steps += len(json.loads(line)["steps"])
    return workloads, steps


def cited(root: Path = ROOT) -> int:
    """Citations of the pinned tree, by the counter of `course cite check`."""
    return sum(len(links.cited(page, root)[0]) for page in citations.pages(root))


def graded(root: Path = ROOT) -> tuple[int, int]:
    """Labs, and the wrong solutions that their tests are proved to catch."""
    found = labs.find_labs(root)
    return len(found), sum(len(lab.manifest.misconceptions) for lab in found)


def table(root: Path = ROOT, citations: int | None = None) -> str:
    """The proofs as a list in Markdown, in the box that the book gives them.

    Args:
        citations: how many there are, where they were counted already; None: count them.
    """
    count = cited(root) if citations is None else citations
    workloads, steps = recorded(root)
    num_labs, wrong = graded(root)
    return "\n".join(
        (
            "<!-- home: proofs -->",
            f"- **{steps:,} steps of vLLM's scheduler, none decided otherwise.** {workloads:,} "
            "workloads recorded from the real one are replayed here, every field of every step "
            "compared: [conformance](conformance/README.md).",
            f"- **{_down(count):,} citations, each exact.** Every file, line and name of "
            "vLLM's source in pages and code is compared with the pinned release: "
            "[the pin](UPSTREAM_PIN.md).",
            f"- **{num_labs} labs, {_down(wrong):,} wrong answers caught.** Each is a mistake "
            "somebody makes, and the test named for it fails on it: "
            "[how labs are written](course/WRITING_LABS.md).",
        )
    )


def said(page: str) -> int:
    """The number of citations that README says; 0 if it says none."""
    found = re.search(r"\*\*([\d,]+) citations, each exact", page)
    return int(found[1].replace(",", "")) if found else 0


def stale(root: Path, count: int) -> str:
    """What is wrong with README's number of citations beside a count of all, "" if nothing is."""
    page = root / "README.md"
    told = said(page.read_text(encoding="utf-8")) if page.is_file() else 0
    if not told or told == _down(count):
        return ""
    return f"README.md says {told:,} citations: run python -m course.truth.proofs"


def _down(count: int) -> int:
    return count // 100 * 100


def replaced(page: str, made: str) -> str:
    """`page` with the proofs between their markers written anew.

    Raises:
        ValueError: the page has no `<!-- proofs -->` ... `<!-- /proofs -->`.
    """
    pattern = re.compile(r"(<!-- proofs -->\n).*?(<!-- /proofs -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError("README.md: no <!-- proofs --> ... <!-- /proofs -->")
    return pattern.sub(lambda match: f"{match[1]}\n{made}\n\n{match[2]}", page)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(replaced(text, table()), encoding="utf-8")
