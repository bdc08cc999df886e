"""The search: words are the same on both sides, nothing is lost in the index, parts stay small."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess

import pytest

from course.conftest import REPOSITORY
from course.site import search
from course.site.search import Section

ENGINE = REPOSITORY / "book" / "search-engine.js"
NODE = shutil.which("node")
PAGE = """<html><head><title>02 Guide - The book</title></head><body><main>
<p class="phase-place">Phase 02</p><h1 id="guide"><a href="#guide">Blocks: the guide</a></h1>
<nav class="phase-strip"><a href="x">Overview</a></nav>
<p>Every block has a <code>ref_<wbr>cnt</code>.</p>
<div class="answer-box"><script type="application/json">{"number": 7.5}</script></div>
<div class="upstream"><pre><code>class UpstreamOnly</code></pre></div>
<h2 id="sharing"><a href="#sharing">Sharing [CPU-OK]</a></h2>
<p>Two tables, one block.</p><pre><code>pool.touch()
</code></pre></main></body></html>"""


def in_node(expression: str, data: object, folder=None):
    """A JavaScript expression (or promise) over `data`, with the engine loaded."""
    if NODE is None:
        pytest.skip("needs node")
    script = f"""
        const fs = require("fs"), vm = require("vm");
        require({json.dumps(str(ENGINE))});
        const folder = {json.dumps(str(folder))};
        const loaded = [];
        CourseSearch.load = async (file) => {{
            loaded.push(file);
            vm.runInThisContext(fs.readFileSync(`${{folder}}/${{file}}`, "utf8"));
        }};
        const data = JSON.parse(fs.readFileSync(0, "utf8"));
        (async () => console.log(JSON.stringify(await ({expression}))))();
    """
    done = subprocess.run(
        [NODE, "-e", script], input=json.dumps(data), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture
def site(tmp_path):
    """Three pages and their index; its name."""

    def make(**pages: str) -> str:
        for name, text in pages.items():
            made = f"<html><head><title>{name} - B</title></head><main>{text}</main></html>"
            (tmp_path / f"{name}.html").write_text(made, encoding="utf-8")
        search.write(tmp_path)
        (index,) = (tmp_path / search.FOLDER).glob("index-*.js")
        return index.stem.removeprefix("index-")

    make.folder = tmp_path / search.FOLDER
    return make


def found(site, name: str, query: str) -> list:
    call = f"CourseSearch.find(data, '{name}')"
    return [(r["path"], r["anchor"]) for r in in_node(call, query, site.folder)]


def test_a_page_is_read_in_sections_without_what_only_leads_about(tmp_path):
    (tmp_path / "a.html").write_text(PAGE, encoding="utf-8")
    page = search.read(tmp_path, tmp_path / "a.html")
    assert page.crumb == "02 Guide"
    assert page.sections == [
        Section("", "Blocks: the guide", "Every block has a ref_cnt.", ""),
        Section("sharing", "Sharing", "Two tables, one block.", "pool.touch()"),
    ]


@pytest.mark.parametrize(
    "family",
    [
        ("cache", "caches", "cached", "caching"),
        ("batch", "batches", "batching"),
        ("preempt", "preempted", "preemption", "preemptions"),
        ("quantize", "quantized", "quantization"),
        ("schedule", "scheduler", "scheduling"),
        ("run", "running"),
        ("query", "queries"),
    ],
)
def test_words_of_one_family_are_one_word(family):
    assert len({search.stem(word) for word in family}) == 1


def test_words_that_only_look_alike_stay_apart():
    assert (
        len({search.stem(word) for word in ("this", "pass", "bus", "axis", "ring", "red", "gpu")})
        == 7
    )


def test_a_name_is_found_whole_and_by_its_parts():
    assert dict(search.words("num_computed_tokens")) == {
        "numcomputedtokens": 1.0, "num": 0.5, "comput": 0.5, "token": 0.5
    }  # fmt: skip
    assert dict(search.words("BlockPool")).keys() == {"blockpool", "block", "pool"}


@pytest.mark.slow
def test_page_and_index_cut_the_words_of_the_course_alike():
    texts = [path.read_text(encoding="utf-8") for path in sorted(REPOSITORY.glob("phase-0*/*.md"))]
    texts += ["Über-Läufe ref_cnt v0.22.1 KVCacheManager.get a--b _x_ \u0663 n-gram's é.é I.E."]
    said = in_node("data.map((text) => CourseSearch.words(text))", texts)
    assert said == [[list(pair) for pair in search.words(text)] for text in texts]


def test_postings_survive_their_writing():
    draw = random.Random(5)
    for spread in (2, 40, 5000):
        sections = sorted(draw.sample(range(spread * 50), 50))
        postings = [(section, draw.randint(1, search.LEVELS)) for section in sections]
        found, before, place = [], -1, 0
        text = search.encoded(postings)
        while place < len(text):
            step = shift = 0
            while (digit := search.ALPHABET.index(text[place])) >= 32:
                step += (digit - 32) << shift
                shift, place = shift + 5, place + 1
            before += step + (digit << shift)
            found.append((before, search.ALPHABET.index(text[place + 1])))
            place += 2
        assert found == postings


@pytest.mark.slow
def test_a_section_that_is_about_a_word_comes_before_one_that_has_it(site):
    name = site(
        a="<h1 id='a'>Other</h1><p>The pool is dry.</p><h2 id='pools'>The pool</h2><p>Blocks.</p>",
        b="<h1 id='b'>Third</h1><p>Much text and, once in it, a pool.</p>",
    )
    assert found(site, name, "pools")[0] == ("a.html", "pools")
    assert len(found(site, name, "pool")) == 3
    assert found(site, name, "zebra") == []


@pytest.mark.slow
def test_a_beginning_finds_its_words_and_all_words_beat_one(site):
    name = site(
        a="<h1 id='a'>Preemption</h1><p>x</p>",
        b="<h1 id='b'>Order</h1><p>null and more</p><h2 id='n'>Padding</h2><p>The null block.</p>",
    )
    assert found(site, name, "preem") == [("a.html", "")]
    assert found(site, name, "null block")[0] == ("b.html", "n")


@pytest.mark.slow
def test_only_the_parts_that_a_query_needs_are_loaded(site, monkeypatch):
    monkeypatch.setattr(search, "SHARD", 40)
    name = site(a="<h1 id='a'>All</h1><p>" + " ".join(f"{c}{c}{c}" for c in "abcdefghijklmnop"))
    call = f"CourseSearch.find(data, '{name}').then(() => loaded)"
    loaded = in_node(call, "ggg", site.folder)
    assert [file.partition("-")[0] for file in loaded][:1] == ["index"]
    assert len(loaded) <= 3 < len(list(site.folder.glob("shard-*")))


def test_every_page_names_the_index_and_every_name_is_that_of_the_content(site):
    name = site(a="<h1 id='a'>A</h1><p>x</p>")
    page = (site.folder.parent / "a.html").read_text(encoding="utf-8")
    assert f'<meta name="course-search" content="search/index-{name}.js">' in page
    again = search._script(site.folder, "index", 0, {"other": 1})
    assert re.fullmatch(r"[0-9a-f]{8}", again) and again != name


@pytest.mark.slow
def test_a_text_that_would_end_a_script_or_a_line_stays_text(site):
    name = site(a="<h1 id='a'>A</h1><p>zebra &lt;/script&gt; \u2028 \"quoted\" \\ back</p>")
    call = f"CourseSearch.find(data, '{name}').then((r) => CourseSearch.textOf(r[0]))"
    assert in_node(call, "zebra", site.folder) == 'zebra </script> "quoted" \\ back'


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    [
        "premption",
        "preemtpion",
        "preempton",
        "what does preemption do",
        "How is a premption decided?",
    ],
)
def test_a_mistyped_word_and_a_question_find_what_is_meant(site, query):
    name = site(
        a="<h1 id='a'>Preemption</h1><p>A request loses its blocks.</p>",
        b="<h1 id='b'>What it does</h1><p>How is this, and what does that do?</p>",
    )
    assert found(site, name, query)[0] == ("a.html", "")


@pytest.mark.slow
def test_a_word_that_nothing_is_like_finds_nothing_and_short_ones_are_taken_as_they_are(site):
    name = site(a="<h1 id='a'>Preemption</h1><p>the gpu and a pool</p>")
    assert found(site, name, "zyzzyva") == [] and found(site, name, "gpx") == []


@pytest.mark.slow
def test_other_names_of_a_thing_find_it(site):
    name = site(
        a="<h1 id='a'>Structured outputs</h1><p>A grammar.</p>",
        b="<h1 id='b'>The guide</h1><p>Decoding is one token at a time.</p>",
    )
    assert found(site, name, "guided decoding")[0] == ("a.html", "")
    assert found(site, name, "what")[:1] == []  # alone it is a word as any other


@pytest.mark.slow
def test_the_vocabulary_is_loaded_only_for_a_word_that_no_page_has(site):
    name = site(a="<h1 id='a'>Preemption</h1><p>pool</p>")
    call = f"CourseSearch.find(data, '{name}').then(() => loaded)"
    kinds = [file.partition("-")[0] for file in in_node(call, "preemption", site.folder)]
    assert "vocabulary" not in kinds
    kinds = [file.partition("-")[0] for file in in_node(call, "premption", site.folder)]
    assert "vocabulary" in kinds
