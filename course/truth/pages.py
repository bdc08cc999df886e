"""Pages that cannot lie: their python blocks run, their links lead somewhere.

Markdown is read by markdown-it-py, so a fence inside a list or a folded answer counts too.
Promises: a `text` block right after a `python` block is that block's exact output; every
relative link, anchor and image exists; a quoted capture stands in the file it names.
"""

from __future__ import annotations

import functools
import html
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

from course import processes
from course.truth.citations import Finding, files_below

TIME_LIMIT = 120.0
"""Seconds the blocks of one page may take together."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language and arguments, its text, and the page line of its fence."""

    language: str
    arguments: tuple[str, ...]
    text: str
    line: int


@functools.lru_cache(maxsize=1024)
def _tokens(page: Path) -> tuple[Token, ...]:
    markdown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return tuple(markdown.parse(page.read_text(encoding="utf-8")))


def find(root: Path, paths: Iterable[Path] = ()) -> list[Path]:
    """Every Markdown page under `paths` (default: the repository)."""
    found: set[Path] = set()
    for start in [Path(path).resolve() for path in paths] or [root]:
        if start.is_file():
            found.add(start)
            continue
        found.update(files_below(start, (".md",)))
    return sorted(found)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, top to bottom."""
    found = []
    for token in _tokens(page):
        if token.type == "fence" and token.map:
            words = re.split(r"[\s,]+", token.info.strip())
            found.append(Block(words[0].lower(), tuple(words[1:]), token.content, token.map[0] + 1))
    return found


# ------------------------------------------------------------------ running


def runnable(page: Path) -> list[tuple[Block, Block | None]]:
    """The python blocks of a page, each with the text block that follows it, if one does."""
    fences = blocks(page)
    pairs: list[tuple[Block, Block | None]] = []
    for block, following in zip_longest(fences, fences[1:]):
        if block.language == "python":
            expects = following is not None and following.language == "text"
            pairs.append((block, following if expects else None))
    return pairs


def run(root: Path, page: Path, time_limit: float = TIME_LIMIT) -> list[Finding]:
    """Run a page's blocks in one fresh process, from the root; what differs or fails."""
    pairs = runnable(page)
    if not pairs:
        return []
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        job = Path(folder) / "job.json"
        out = Path(folder) / "out.jsonl"
        data = {
            "page": str(page),
            "out": str(out),
            "blocks": [[block.text, block.line] for block, _ in pairs],
        }
        job.write_text(json.dumps(data), encoding="utf-8")
        env = {"OPENBLAS_NUM_THREADS": "1", **os.environ}  # two that spin cost minutes when busy
        env |= {"PYTHONUTF8": "1", "NO_COLOR": "1", "PYTHONHASHSEED": "0"}
        tool = str(Path(__file__).parents[2])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), tool, env.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "course.truth.pagerunner", str(job)]
        ran = processes.run(command, root, env, time_limit)
        results = (
            [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
            if out.exists()
            else []
        )
    findings = []
    for (block, expected), result in zip(pairs, results, strict=False):
        if result["error"]:
            findings.append(Finding(page, result["line"] or block.line, result["error"]))
        elif expected is not None and result["output"] != expected.text:
            findings.append(difference(page, expected, result["output"]))
    if len(results) < len(pairs):
        block = pairs[len(results)][0]
        if not any(result["error"] for result in results):
            what = {
                "time": f"out of time after {time_limit:g} s",
                "output": "it printed without end",
            }.get(ran.ended, f"exit {ran.code}")
            findings.append(
                Finding(page, block.line, f"this block did not finish: {what}\n{ran.output[-800:]}")
            )
    return findings


def difference(page: Path, expected: Block, came: str) -> Finding:
    """The first line at which a text block and the output part."""
    shown, real = expected.text.splitlines(), came.splitlines()
    for offset in range(max(len(shown), len(real))):
        left = shown[offset] if offset < len(shown) else "<nothing>"
        right = real[offset] if offset < len(real) else "<nothing>"
        if left != right:
            break
    else:
        return Finding(page, expected.line, "the page and the output differ in their last newline")
    return Finding(
        page,
        expected.line + 1 + offset,
        f"the output of the block above differs here\n  page   {left}\n  output {right}",
    )


# ------------------------------------------------------------------ links, images, captures


def check_links(root: Path, page: Path) -> list[Finding]:
    """Links, anchors, image texts and quoted captures of one page."""
    findings = []
    for line, kind, target, text in _targets(page):
        if kind == "image" and not text.strip():
            findings.append(Finding(page, line, f"the image {target} has no alt text"))
        parts = urlsplit(target)
        if parts.scheme or target.startswith("//"):
            continue
        if problem := _dead(root, page, unquote(parts.path), unquote(parts.fragment)):
            findings.append(Finding(page, line, f"{target}: {problem}"))
    for block in blocks(page):
        findings += _capture_problems(page, block)
    findings += [
        Finding(page, line, "a list begins inside a paragraph: leave a line, or reword this one")
        for line in _interrupted(page)
    ]
    return findings


def _interrupted(page: Path) -> Iterator[int]:
    """Lines where a sentence that wraps at a number or a sign became a list."""
    tokens = _tokens(page)
    for before, token in pairwise(tokens):
        opens = token.type in ("bullet_list_open", "ordered_list_open") and token.level == 0
        if opens and before.type == "paragraph_close" and token.map:
            line = token.map[0]
            if page.read_text(encoding="utf-8").splitlines()[line - 1].strip():
                yield line + 1


def _dead(root: Path, page: Path, path: str, fragment: str) -> str:
    if path.startswith("/"):
        return "write a relative link; this one leads nowhere on GitHub"
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(root.resolve()):
        return "leads out of the repository"
    if not target.exists():
        return "there is no such file"
    if not _same_case(target):
        return "there is a file of that name in other letters (upper and lower case differ)"
    if "upstream" in target.relative_to(root.resolve()).parts[:1]:
        return "leads into upstream/, which readers may not have: cite instead"
    if fragment and target.suffix == ".md" and fragment not in anchors(target):
        near = [a for a in sorted(anchors(target)) if fragment.split("-")[0] in a][:3]
        return f"{target.name} has no anchor #{fragment}" + (
            f" (it has {', '.join('#' + a for a in near)})" if near else ""
        )
    return ""


def _same_case(path: Path) -> bool:
    """Whether the name on disk is spelt so, also where the file system does not mind."""
    return path.name in {entry.name for entry in path.parent.iterdir()}


@functools.lru_cache(maxsize=1024)
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page: its headings, as GitHub makes them, and ids in its HTML."""
    found = set(headings(page))
    for token in _tokens(page):
        for piece in (token, *(token.children or ())):
            if piece.type in ("html_block", "html_inline"):
                found.update(re.findall(r"""\b(?:id|name)=["']([^"']+)["']""", piece.content))
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def headings(page: Path) -> dict[str, int]:
    """The anchor of every heading of a page, as GitHub makes it, and its last line, from 1."""
    found: dict[str, int] = {}
    seen: dict[str, int] = {}
    for token, following in pairwise(_tokens(page)):
        if token.type == "heading_open":
            slug = slug_of(_plain(following))
            number = seen.get(slug, 0)
            seen[slug] = number + 1
            found[f"{slug}-{number}" if number else slug] = token.map[1] if token.map else 1
    return found


def slug_of(heading: str) -> str:
    """A heading's anchor: lower case, punctuation dropped, spaces to hyphens."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def _plain(inline: Token) -> str:
    return "".join(
        child.content for child in inline.children or () if child.type in ("text", "code_inline")
    )


def _targets(page: Path) -> Iterator[tuple[int, str, str, str]]:
    """(line, "link" or "image", target, text) of everything a page points at."""
    for token in _tokens(page):
        line = token.map[0] + 1 if token.map else 1
        if token.type == "html_block":
            yield from _html_targets(token.content, line)
        if token.type != "inline":
            continue
        for child in token.children or ():
            if child.type in ("softbreak", "hardbreak"):
                line += 1
            elif child.type == "link_open":
                yield line, "link", str(child.attrs.get("href", "")), ""
            elif child.type == "image":
                yield line, "image", str(child.attrs.get("src", "")), child.content
            elif child.type == "html_inline":
                yield from _html_targets(child.content, line)


def _html_targets(text: str, line: int) -> Iterator[tuple[int, str, str, str]]:
    for match in re.finditer(r"<(a|img)\b([^>]*)>", text, re.IGNORECASE):
        attributes = dict(re.findall(r"""([\w-]+)=["']([^"']*)["']""", match[2]))
        at = line + text.count("\n", 0, match.start())
        if match[1].lower() == "img":
            alt = html.unescape(attributes.get("alt", ""))
            yield at, "image", html.unescape(attributes.get("src", "")), alt
        elif "href" in attributes:
            yield at, "link", html.unescape(attributes["href"]), ""


def _capture_problems(page: Path, block: Block) -> Iterator[Finding]:
    """A block fenced as `console capture=PATH` stands, line for line, in that capture."""
    named = [a.removeprefix("capture=") for a in block.arguments if a.startswith("capture=")]
    for name in named:
        path = page.parent / name
        try:
            output = json.loads(path.read_text(encoding="utf-8"))["output"]
        except FileNotFoundError:
            yield Finding(page, block.line, f"there is no capture {name}")
            continue
        except (ValueError, KeyError, TypeError):
            yield Finding(page, block.line, f"{name} is not a capture written by course gpu run")
            continue
        real = [line.rstrip() for line in output.splitlines()]
        at = 0
        for offset, line in enumerate(block.text.splitlines()):
            wanted = line.rstrip()
            if wanted == "...":  # lines left out
                continue
            try:
                at = real.index(wanted, at) + 1
            except ValueError:
                yield Finding(
                    page,
                    block.line + 1 + offset,
                    f"{name} does not hold this line (in this order): {wanted}",
                )
                break
