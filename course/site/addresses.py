"""Where a page's links lead: in the site, and in vLLM's source at the pinned commit."""

from __future__ import annotations

import os
import re
from pathlib import Path

from course.truth.citations import Citation

COMMIT = "0decac0d96c42b49572498019f0a0e3600f50398"
"""The pinned commit in full: what a permanent link names."""

SOURCE = f"https://github.com/vllm-project/vllm/blob/{COMMIT}"


def source_link(citation: Citation) -> str:
    """The cited lines at the pinned commit on GitHub."""
    if not citation.first:
        return f"{SOURCE}/{citation.path}"
    lines = f"#L{citation.first}"
    if citation.last != citation.first:
        lines += f"-L{citation.last}"
    return f"{SOURCE}/{citation.path}{lines}"


def phase_of(root: Path, page: Path) -> Path | None:
    """The phase folder a page is in."""
    first = page.relative_to(root).parts[0]
    return root / first if first.startswith("phase-") else None


def href(page: Path, target: Path) -> str:
    """Where a link of one page to another leads in the site."""
    path = Path(os.path.relpath(target, page.parent)).as_posix()
    return re.sub(r"\.md$", ".html", re.sub(r"(^|/)README\.md$", r"\1index.html", path))
