"""The site in a real browser: every page whole, the widgets true, nothing from outside.

Needs playwright, the book extra and a Chromium on the PATH; skips with a reason where one lacks.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from course.site import widgets
from course.site.test_widgets import CROWDED, DRAFTED, EXPERTS, KNOBS, LENGTHS
from course.site.widgets import (
    code_points,
    expert_bytes,
    kv_calculator,
    release_bisect,
    roofline,
    sampling_knobs,
    speculation,
)
from mini_vllm.cudagraph import launches

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[1]
FIRST_PAGE_LIMIT = 200_000
PAGE_LIMIT = 1_500_000


def pages_of(site: Path) -> list[str]:
    """Every page of the book by its path in the site."""
    skipped = {"toc.html", "print.html", "404.html"}
    return sorted(
        path.relative_to(site).as_posix()
        for path in site.rglob("*.html")
        if path.name not in skipped
    )


def page_with(site: Path, widget: str) -> str:
    """The first page that holds a widget."""
    for path in pages_of(site):
        if f'data-widget="{widget}"' in (site / path).read_text(encoding="utf-8"):
            return path
    pytest.fail(f"no page shows the widget {widget}")


def shown(host, selector: str, attribute: str) -> list[str]:
    """An attribute of every element below `host` that the selector finds."""
    return host.locator(selector).evaluate_all(
        "(nodes, name) => nodes.map((node) => node.getAttribute(name))", attribute
    )


# ------------------------------------------------------------------ pages


TOO_WIDE = """() => {
    const found = [];
    const wide = document.documentElement.scrollWidth - innerWidth;
    if (wide > 0) found.push(`the page is ${wide} pixels too wide`);
    for (const box of document.querySelectorAll(".content .table-wrapper")) {
        const over = box.scrollWidth - box.clientWidth;
        if (over > 0 && innerWidth < 600)
            found.push(`${over} pixels too wide: ${box.innerText.slice(0, 60)}`);
    }
    const lines = (node) => {
        const range = document.createRange();
        range.selectNodeContents(node);
        return new Set([...range.getClientRects()].map((box) => Math.round(box.top / 4))).size;
    };
    for (const tag of document.querySelectorAll(".content .tag")) {
        if (lines(tag) > 1) found.push(`broken: ${tag.textContent}`);
    }
    for (const code of document.querySelectorAll(".content :is(td, th) code")) {
        for (const part of code.childNodes) {
            const name = part.textContent;
            const whole = /^[\\w./]+$/.test(name) && name.length < 40;  // a hash has no joint
            if (whole && lines(part) > 1) found.push(`broken: ${name}`);
        }
    }
    return found;
}"""


def test_every_page_loads_in_silence_fits_its_screen_and_asks_nobody_else(site, url, open_page):
    page = open_page(width=390)
    wrong = []
    for path in pages_of(site):
        page.goto(url + path)
        wrong += [f"{path} at 390: {found}" for found in page.evaluate(TOO_WIDE)]
        wrong += [f"{path}: {text}" for text in page.complaints]
        page.complaints.clear()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", ["index.html", "phase-06-quantization/00-guide.html"])
def test_the_first_page_and_the_heaviest_are_light(open_page, path):
    page = open_page(path)
    page.wait_for_load_state("networkidle")
    weights = {}
    page.on("response", lambda r: weights.update({r.url: len(gzip.compress(r.body()))}))
    page.reload()
    page.wait_for_load_state("networkidle")
    assert len(weights) > 5, weights
    assert sum(weights.values()) < FIRST_PAGE_LIMIT, weights


@pytest.mark.slow
def test_no_page_is_heavy_with_its_figures(site, open_page, url):
    page = open_page()
    weights: dict[str, int] = {}
    page.on("response", lambda r: weights.update({r.url: len(r.body())}))
    heavy = {}
    for path in pages_of(site):
        weights.clear()
        page.goto(url + path, wait_until="load")
        if sum(weights.values()) > PAGE_LIMIT:
            heavy[path] = sum(weights.values())
    assert not heavy


@pytest.mark.parametrize(("theme", "scheme"), [("light", "light"), ("navy", "dark")])
def test_figures_follow_the_theme_that_the_reader_chose(open_page, theme, scheme):
    """An SVG in an <img> takes its `prefers-color-scheme` from the page's `color-scheme`."""
    page = open_page("phase-00-foundations/00-guide.html", theme=theme)
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == scheme


PHASE = "phase-01-architecture-and-request-lifecycle"
PAGE_TYPES = [
    "index.html",
    "GLOSSARY.html",
    "phase-00-foundations/00-guide.html",
    f"{PHASE}/01-deep-dive.html",
    f"{PHASE}/labs/lab-03-engine-step-by-hand/index.html",
    *(
        pytest.param(path, marks=pytest.mark.slow)
        for path in (
            f"{PHASE}/index.html",
            f"{PHASE}/02-mini-build.html",
            f"{PHASE}/READING.html",
            f"{PHASE}/EXERCISES.html",
            f"{PHASE}/INTERVIEW.html",
            f"{PHASE}/CHEATSHEET.html",
            "phase-02-paged-attention/EXERCISES.html",
            "404.html",
            "CAREER.html",
            "CHALLENGES.html",
            "CHANGES.html",
            "PLAYGROUND.html",
            "RECORDINGS.html",
            "SETUP.html",
            "SIMULATE.html",
            "SINCE_THE_PIN.html",
            "SPINE.html",
            "benchmarks/index.html",
            "conformance/index.html",
            "conformance/museum/index.html",
            "models/byte-draft/index.html",
            "course/WRITING_LABS.html",
        )
    ),
]
LOOKS = [  # each width and each theme once; what a width breaks, it breaks in both themes
    (390, "navy"),
    (1280, "light"),
    pytest.param(390, "light", marks=pytest.mark.slow),
    pytest.param(1280, "navy", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("width", "theme"), LOOKS)
@pytest.mark.parametrize("path", PAGE_TYPES)
def test_pages_have_no_serious_barrier(open_page, path, width, theme):
    assert barriers(open_page(path, width=width, theme=theme)) == []


@pytest.mark.parametrize("path", PAGE_TYPES)
def test_each_type_of_page_fits_a_desktop(open_page, path):
    assert open_page(path, width=1280).evaluate(TOO_WIDE) == []


def barriers(page, *within: str) -> list[str]:
    """What axe finds serious or critical: the rule, and the first place.

    `within` are selectors: what they find is looked at alone, which takes a tenth of the time.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe")
    context = {"include": [[selector] for selector in within]} if within else None
    # Of what passes it would list every node too, which takes as long as the checks.
    options = {"resultTypes": ["violations"]}
    found = axe.Axe().run(page, context=context, options=options).response["violations"]
    return [
        f"{v['id']} x{len(v['nodes'])}: {v['nodes'][0]['html'][:200]}"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


# ------------------------------------------------------------------ widgets


@pytest.fixture
def widget(site, open_page):
    """A widget on its page, drawn."""

    def find(name: str, **settings):
        page = open_page(page_with(site, name), **settings)
        host = page.locator(f'[data-widget="{name}"]').first
        page.locator(f'[data-widget="{name}"][data-ready]').first.wait_for(state="attached")
        assert page.complaints == []
        return host

    return find


def widgets_by_page(site: Path) -> dict[str, list[str]]:
    """Every widget on the first page that has it."""
    found: dict[str, list[str]] = {}
    for name in widgets.NAMES:
        found.setdefault(page_with(site, name), []).append(name)
    return found


def test_without_javascript_a_widget_is_a_figure_with_a_text(site, url, open_page):
    page = open_page(javascript=False)
    for path, names in widgets_by_page(site).items():
        page.goto(url + path)
        for name in set(names) - {"first-lab"}:  # an editor: without JavaScript it takes no room
            figure = page.locator(f'[data-widget="{name}"] img').first
            assert figure.is_visible(), name
            assert figure.get_attribute("alt"), name


@pytest.mark.parametrize(
    ("width", "theme"), [LOOKS[0], pytest.param(*LOOKS[1], marks=pytest.mark.slow), *LOOKS[2:]]
)
def test_widgets_fit_their_screen_and_have_no_serious_barrier(site, url, open_page, width, theme):
    page = open_page(width=width, theme=theme)
    wrong = []
    for path, names in widgets_by_page(site).items():
        page.goto(url + path)
        hosts = [f'[data-widget="{name}"]' for name in names]
        for host in hosts:
            page.locator(f"{host}[data-ready]").first.wait_for(state="attached")
        wrong += [f"{path}: {found}" for found in barriers(page, *hosts)]
        wrong += [f"{path} at {width}: {found}" for found in page.evaluate(TOO_WIDE)]
        wrong += [f"{path}: {text}" for text in page.complaints]
        page.complaints.clear()
    assert not wrong, "\n".join(wrong)


def test_the_film_shows_each_frame_forward_and_back(widget):
    film = widgets.document("pool-film")
    host = widget("pool-film")

    def check(place: int) -> None:
        frame = film["frames"][place]
        assert shown(host, ".film-pool > li", "data-ref") == [
            str(b["ref_cnt"]) for b in frame["blocks"]
        ]
        assert shown(host, ".film-pool > li", "data-hash") == [b["hash"] for b in frame["blocks"]]
        free = [i for i in shown(host, ".film-queue > li", "data-id") if i]
        assert free == [str(i) for i in frame["free_queue"]]
        assert [h for h in shown(host, ".film-index > li", "data-hash") if h] == list(
            frame["index"]
        )
        for request, table in frame["tables"].items():
            row = host.locator(f'.film-tables > li[data-request="{request}"]')
            assert row.inner_text() == f"{request}: {json.dumps(table)}"
        assert frame["say"] in host.inner_text()

    last = len(film["frames"]) - 1
    check(0)
    for place in range(1, last + 1):
        host.get_by_role("button", name="Next frame").click()
        check(place)
    assert host.get_by_role("button", name="Next frame").is_disabled()
    for place in range(last - 1, -1, -1):
        host.get_by_role("button", name="Previous frame").click()
        check(place)


def test_the_timeline_shows_each_step_forward_and_back(widget):
    run = widgets.document("engine-timeline")
    host = widget("engine-timeline")

    def check(step: int) -> None:
        total = run["totals"][step]
        facts = {
            "tokens": f"{total['scheduled']} / {total['budget']}",
            "running": str(total["running"]),
            "waiting": str(total["waiting"]),
            "free blocks": str(total["free_blocks"]),
            "hit tokens": str(total["hits"]),
        }
        texts = host.locator("dd[data-fact]").evaluate_all(
            "(nodes) => nodes.map((node) => [node.dataset.fact, node.textContent])"
        )
        assert dict(texts) == facts
        for request in run["requests"]:
            cells = {cell["step"]: cell for cell in request["cells"]}
            row = host.locator(f'tr[data-request="{request["id"]}"] td')
            now = row.nth(step)
            cell = cells.get(step, {"tokens": 0, "kind": "absent"})
            assert now.get_attribute("data-tokens") == str(cell["tokens"])
            assert now.get_attribute("data-kind") == cell["kind"]

    last = len(run["totals"]) - 1
    check(0)
    for step in range(1, last + 1):
        host.get_by_role("button", name="Next step").click()
        check(step)
    for step in range(last - 1, last - 4, -1):
        host.get_by_role("button", name="Previous step").click()
        check(step)


@pytest.mark.parametrize("name", ["pool-film", "engine-timeline"])
def test_the_arrow_keys_move_the_widget_and_not_the_book(widget, name):
    host = widget(name)
    box, page = host.locator(".widget-box[data-place]"), host.page
    address = page.url
    host.get_by_role("button", name="Play every").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert box.get_attribute("data-place") == "1"
    assert page.url == address


def test_the_calculator_gives_the_numbers_of_its_document(widget):
    host = widget("kv-calculator")
    sizes = (24, 0.92, 16, 2048), (80, 0.9, 32, 8192)
    shapes = kv_calculator.document()["models"]
    for (model, shape), size in itertools.product(shapes.items(), sizes):
        gib, utilization, block_size, length = size
        host.locator('[data-input="gib"]').fill(str(gib))
        host.locator('[data-input="utilization"]').fill(str(utilization))
        host.locator('[data-input="other_gib"]').fill("1")
        host.locator('[data-input="max_model_len"]').fill(str(length))
        host.locator('[data-input="model"]').select_option(model)
        host.locator('[data-input="block_size"]').select_option(str(block_size))
        values = host.locator("dd[data-result]").evaluate_all(
            "(nodes) => nodes.map((node) => [node.dataset.result, Number(node.dataset.value)])"
        )
        found = dict(values)
        available = math.ceil(gib * 2**30 * utilization) - 2 * shape["parameters"] - 2**30
        per_token = shape["kv_bytes_per_token"]
        expected = kv_calculator.capacity(available, per_token, block_size, length)
        assert {key: found[key] for key in expected} == expected, (model, size)


def test_the_calculator_names_a_field_it_cannot_use(widget):
    host = widget("kv-calculator")
    host.locator('[data-input="utilization"]').fill("1.5")
    assert host.get_by_role("alert").inner_text() == "Share for the engine: need 0.05 to 1"


def test_the_roofline_formula_is_that_of_its_document(widget):
    document = roofline.document()
    host = widget("roofline")
    sizes = (1, 128), (64, 2048), (256, 1024)
    for shape, gpu, size in itertools.product(
        document["models"].values(), document["gpus"].values(), sizes
    ):
        found = host.page.evaluate(
            "([s, g, b, c]) => CourseWidgets.formulas.decodeStep(s, g, b, c)", [shape, gpu, *size]
        )
        expected = roofline.decode_step(shape, gpu, *size)
        for key, value in found.items():
            assert value == pytest.approx(expected[key], rel=1e-12), (key, shape, gpu, size)


def test_the_roofline_shows_what_its_sliders_say(widget):
    host = widget("roofline")
    host.locator('[data-input="context"]').focus()
    host.page.keyboard.press("End")
    document = roofline.document()
    expected = roofline.decode_step(
        document["models"]["Llama 3 8B"], document["gpus"]["A100 80 GB"], 64, 131072
    )
    for key in ("intensity", "kv_bytes", "tokens_per_s"):
        value = float(host.locator(f'dd[data-result="{key}"]').get_attribute("data-value"))
        assert value == pytest.approx(expected[key], rel=1e-12)
    assert "131,072 tokens each" in host.inner_text()


def test_the_graph_timeline_follows_the_recurrence_of_its_document(widget):
    host = widget("cuda-graphs")
    for layers, *times in (1, 5, 2), (4, 5, 2), (4, 5, 10), (6, 2.5, 2.5):
        for name, value in zip(("layers", "launch_us", "kernel_us"), (layers, *times), strict=True):
            host.locator(f'[data-input="{name}"]').fill(str(value))
        for mode in launches.MODES:
            line = launches.simulate(launches.LAYER * layers, mode, *times)
            expected = (len(line.launches), line.step_us, line.gpu_busy)
            row = host.locator(f'tr[data-mode="{mode}"]')
            for key, value in zip(("launches", "step_us", "gpu_busy"), expected, strict=True):
                found = float(row.locator(f'[data-result="{key}"]').get_attribute("data-value"))
                assert found == pytest.approx(value, rel=1e-12), (key, mode, layers, times)


def test_drafts_follow_the_formulas_of_their_document(widget):
    ridges = speculation.document()["ridges"]
    host = widget("speculation")
    runs = (
        (0.7, 5, 0.05, 1), (0.7, 5, 0.05, 64), (0.7, 3, 0.05, 512), (0.3, 2, 0.3, 8),
        (0.9, 10, 0.1, 16), (1.0, 4, 0.0, 1024),
    )  # fmt: skip
    for gpu, run in itertools.product(("A100 80 GB", "H100 SXM"), runs):
        found = host.page.evaluate(
            "([a, k, c, b, r]) => CourseWidgets.formulas.speculationStep(a, k, c, b, r)",
            [*run, ridges[gpu]],
        )
        for key, value in speculation.step(*run, ridges[gpu]).items():
            assert found[key] == pytest.approx(value, rel=1e-12), (key, gpu, run)
    for text, lengths in itertools.product(DRAFTED, LENGTHS):
        found = host.page.evaluate(
            "([t, low, high, k]) => CourseWidgets.formulas.draftedRuns(t, low, high, k)",
            [text, *lengths],
        )
        assert found == speculation.drafted_runs(text, *lengths), (text, lengths)


def test_knobs_follow_the_stages_of_their_document(widget):
    host = widget("sampling-knobs")
    orders = sampling_knobs.ORDERS
    asked = [("vLLM's", knobs) for knobs in KNOBS] + [*itertools.product(orders, CROWDED)]
    for row, (order, knobs) in itertools.product(sampling_knobs.rows().values(), asked):
        found = host.page.evaluate(
            "([r, k, o]) => CourseWidgets.formulas.samplingStages(r, k, o)",
            [row, knobs, orders[order]],
        )
        left, law = sampling_knobs.stages(row, knobs, orders[order])
        assert found["left"] == left, (order, knobs)
        assert found["law"] == pytest.approx(law.tolist(), rel=1e-9), (order, knobs)


def test_a_question_about_knobs_sets_them_and_counts(widget):
    document = widgets.document("sampling-knobs")
    host = widget("sampling-knobs")
    for question in document["questions"]:
        assert question["ask"] in host.inner_text()
        host.get_by_role("button", name="Set the knobs and count").click()
        host.get_by_text("Say a number first.").wait_for()
        host.locator('[data-input="guess"]').fill(str(question["answer"]))
        host.get_by_role("button", name="Set the knobs and count").click()
        host.get_by_text(f"{question['answer']}, as you said.").wait_for()
        left = json.loads(host.locator("[data-left]").get_attribute("data-left"))
        assert left[-1] == question["answer"]
        host.get_by_role("button", name="Next").click()
    host.locator('[data-input="temperature"]').fill("0")
    host.locator('[data-input="order"]').select_option("vLLM's")
    assert "Greedy" in host.inner_text()


def answered_wrongly(host: Any, document: dict[str, Any], button: str) -> None:
    """Each question of a widget, answered by one more than is right, and what is then said."""
    for question in document["questions"]:
        assert question["ask"] in host.inner_text()
        host.locator('[data-input="guess"]').fill(str(question["answer"] + 1))
        host.get_by_role("button", name=button).click()
        host.get_by_text(f"{question['answer']}; you said {question['answer'] + 1}.").wait_for()
        host.get_by_role("button", name="Next").click()


def test_slots_show_what_the_engine_did_and_questions_set_them(widget):
    document = widgets.document("adapter-slots")
    host = widget("adapter-slots")
    answered_wrongly(host, document, "Run it")
    for pattern, films in document["films"].items():
        host.locator('[data-input="pattern"]').select_option(pattern)
        for slots, film in films.items():
            host.locator('[data-input="slots"]').fill(slots)
            told = host.locator("[data-last]")
            for key in ("last", "waited", "loads"):
                assert told.get_attribute(f"data-{key}") == str(film[key]), (pattern, slots)
            cells = sum(len(step["states"]) - step["states"].count(".") for step in film["steps"])
            assert host.locator("svg rect").count() == cells


def test_blocks_of_layers_are_the_managers_and_questions_set_them(widget):
    document = widgets.document("layer-blocks")
    host = widget("layer-blocks")
    answered_wrongly(host, document, "Run it")
    for layers, films in document["films"].items():
        host.locator('[data-input="layers"]').select_option(layers)
        for budget, film in films.items():
            host.locator('[data-input="budget"]').select_option(budget)
            for place, step in enumerate(film):
                host.locator('[data-input="step"]').fill(str(place))
                told = host.locator("[data-held]")
                for key in ("held", "free"):
                    assert told.get_attribute(f"data-{key}") == str(step[key]), (layers, budget)
                assert host.locator("svg rect").count() == sum(map(len, step["tables"]))


def test_prompts_cross_as_the_document_says_and_questions_set_them(widget):
    document = widgets.document("two-pools")
    host = widget("two-pools")
    answered_wrongly(host, document, "Run it")
    for key in ("512|20|10", "8192|200|400", "2048|60|two replicas"):
        prompt, every, arm = key.split("|")
        host.locator('[data-input="prompt"]').select_option(prompt)
        host.locator('[data-input="every"]').select_option(every)
        host.locator('[data-input="arm"]').select_option(
            f"1P1D, {arm} Gb/s" if arm.isdigit() else arm
        )
        told = host.locator("[data-ttft]")
        for name in ("ttft", "gap"):
            assert told.get_attribute(f"data-{name}") == str(document["films"][key][name]), key
        crossings = host.locator('svg rect[data-kind="wire"]').count()
        assert crossings == (6 if arm.isdigit() else 0)


def test_a_broken_rule_shows_its_edit_and_the_first_step_that_notices(widget):
    host = widget("broken-rule")
    for each in widgets.document("broken-rule")["rules"]:
        host.locator('[data-input="rule"]').select_option(each["rule"])
        assert host.locator("[data-differ]").get_attribute("data-differ") == str(each["differ"])
        assert f"in step {each['first']['step']}" in host.locator("[data-differ]").inner_text()
        changed = [line for line in each["edits"].split("\n") if line[0] in "+-"]
        assert host.locator(".broken-edits :is(ins, del)").count() == len(changed)
        shown = host.locator(".broken-first dd").all_inner_texts()
        assert shown == [each["first"][key] for key in ("field", "expected", "got")]


def test_pictures_are_planned_as_by_the_engine_and_questions_set_them(widget):
    document = widgets.document("picture-budget")
    host = widget("picture-budget")
    answered_wrongly(host, document, "Run it")
    for key in ("1280 x 960|1280 x 960|none|2048|0", "336 x 336|640 x 480|1280 x 960|512|1"):
        made = document["films"][key]
        *sizes, budget, same = key.split("|")
        for field, value in zip(("first", "second", "third"), sizes, strict=True):
            host.locator(f'[data-input="{field}"]').select_option(value)
        host.locator('[data-input="budget"]').select_option(budget)
        host.locator('[data-input="same"]').select_option("yes" if same == "1" else "no")
        ran = ""
        for place, step in enumerate(made["steps"]):
            host.locator('[data-input="step"]').fill(str(place))
            ran += step[2]
            told = host.locator("[data-runs]")
            assert told.get_attribute("data-runs") == str(len(ran))
            assert told.get_attribute("data-again") == str(len(ran) - len(set(ran)))


def test_pieces_of_a_stream_are_what_the_parser_sent_and_questions_set_them(widget):
    document = widgets.document("stream-buffers")
    host = widget("stream-buffers")
    answered_wrongly(host, document, "Cut it")
    for name, films in document["films"].items():
        host.locator('[data-input="text"]').select_option(name)
        for place, length in enumerate(document["lengths"]):
            host.locator('[data-input="length"]').fill(str(place))
            told, film = host.locator("[data-deltas]"), films[str(length)]
            for key in ("deltas", "held", "calls"):
                assert told.get_attribute(f"data-{key}") == str(film[key]), (name, length)
            assert host.locator("tbody tr").count() == len(film["steps"])


def test_ranks_that_change_places_change_what_the_document_says(widget):
    document = widgets.document("shard-matrix")
    host = widget("shard-matrix")
    answered_wrongly(host, document, "Show it")
    for kind, words in document["kinds"].items():
        host.locator('[data-input="cut"]').select_option(words)
        host.locator('[data-input="ranks"]').select_option("4")
        host.locator('[data-rank="1"]').click()
        host.locator('[data-rank="3"]').click()
        film = document["cuts"][kind]["0321"]
        assert host.locator("[data-wrong]").get_attribute("data-wrong") == str(film["wrong"])
        for rank in range(4):  # of W, of its own results, and one of x or of the outputs
            cells = 4 + len(film["parts"][rank]) + 1
            assert host.locator(f"svg rect.shard-{rank}").count() == cells
        for size in document["sizes"]:
            host.locator('[data-input="size"]').select_option(size)
            for tokens in document["tokens"]:
                host.locator('[data-input="tokens"]').select_option(str(tokens))
                bill = document["bills"][kind][size]["4"][str(tokens)]
                told = host.locator("[data-sent]")
                for key in ("sent", "weights"):
                    assert told.get_attribute(f"data-{key}") == str(bill[key])


def test_a_rank_that_is_dragged_onto_another_changes_slices_with_it(widget):
    host = widget("shard-matrix")
    host.locator('[data-rank="0"]').drag_to(host.locator('[data-rank="1"]'))
    assert host.locator('[data-rank="0"]').inner_text() == "rank 0: slice 1"
    host.get_by_text("4 of 4 outputs stand in the wrong place").wait_for()


def test_bytes_light_up_as_the_engine_allowed_them_and_questions_go_there(widget):
    document = widgets.document("allowed-bytes")
    host = widget("allowed-bytes")
    answered_wrongly(host, document, "Show it")
    for name, film in document["films"].items():
        host.locator('[data-input="case"]').select_option(name)
        for place in (0, len(film["places"]) // 2, len(film["places"]) - 1):
            host.locator('[data-input="place"]').fill(str(place))
            told = host.locator("[data-count]")
            runs = film["places"][place]["allowed"]
            legal = sum(last - first + 1 for first, last in runs)
            assert told.get_attribute("data-count") == str(legal), (name, place)
            assert float(told.get_attribute("data-legal")) == film["places"][place]["legal"]
            lit = host.locator("svg rect.allowed-legal, svg rect.allowed-taken").count()
            assert lit == legal


def test_the_sliders_of_drafts_show_what_they_say(widget):
    host = widget("speculation")
    for name, value in {"alpha": "0.7", "k": "5", "c": "0.05", "batch": "15"}.items():
        host.locator(f'[data-input="{name}"]').fill(value)
    expected = speculation.step(0.7, 5, 0.05, 1024, speculation.document()["ridges"]["H100 SXM"])
    shown = host.locator('[data-result="speedup"]').get_attribute("data-value")
    assert float(shown) == pytest.approx(expected["speedup"], rel=1e-9)
    host.get_by_text("A loss.").wait_for()
    host.locator('[data-input="text"]').fill("abab abab abab")
    runs = json.loads(host.locator('[data-result="runs"]').get_attribute("data-value"))
    assert runs == speculation.drafted_runs("abab abab abab", 2, 5, 5)


def test_the_code_points_follow_the_rounding_of_their_document(widget):
    host = widget("code-points")
    sizes = (256, 1), (256, 20), (32, 8)
    for (name, row), form, (size, spike) in itertools.product(
        code_points.rows().items(), code_points.FORMATS, sizes
    ):
        host.locator('[data-input="row"]').select_option(name)
        host.locator('[data-input="format"]').select_option(form)
        if "size" not in code_points.FORMATS[form]:
            host.locator('[data-input="size"]').select_option(str(size))
        host.locator('[data-input="spike"]').fill(str(spike))
        for key, expected in code_points.on_grid(row, form, size, spike).items():
            value = float(host.locator(f'[data-result="{key}"]').get_attribute("data-value"))
            assert value == pytest.approx(expected, rel=1e-9), (key, name, form, size, spike)
    host.locator('[data-input="spike"]').fill("12")
    for form, size, words in (
        ("E4M3", "256", "They hardly notice."),
        ("int4", "256", "All others share its scale, and pay."),
        ("int4", "16", "The 15 that share its scale pay."),
        ("MXFP4", None, "The 31 that share its scale pay."),
    ):
        host.locator('[data-input="format"]').select_option(form)
        if size:
            host.locator('[data-input="size"]').select_option(size)
        assert words in host.inner_text(), form


OUTSIDE = """() => {
    const canvas = document.querySelector("svg").getBoundingClientRect();
    return [...document.querySelectorAll("svg text")].filter((text) => {
        const box = text.getBoundingClientRect();
        const wide = box.left < canvas.left - 1 || box.right > canvas.right + 1;
        const high = box.top < canvas.top - 2 || box.bottom > canvas.bottom + 2;
        return box.width && (wide || high);
    }).map((text) => text.textContent);
}"""


def test_no_text_of_a_figure_leaves_its_canvas(browser):
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    figures = sorted([*ROOT.glob("phase-*/figures/*.svg"), *ROOT.glob("book/figures/*.svg")])
    found = {}
    for figure in figures:
        page.set_content(figure.read_text(encoding="utf-8"))
        if outside := page.evaluate(OUTSIDE):
            found[figure.relative_to(ROOT).as_posix()] = outside
    page.set_content("<svg width='40' height='20'><text x='20' y='15'>too long</text></svg>")
    assert page.evaluate(OUTSIDE) == ["too long"]
    page.close()
    assert len(figures) > 100
    assert found == {}


def test_the_experts_a_step_reads_are_those_of_its_document(widget):
    host = widget("expert-bytes")
    for asked in EXPERTS:
        touched, drawn = host.page.evaluate(
            "([e, k, b]) => [CourseWidgets.formulas.expertsTouched(e, k, b),"
            " CourseWidgets.formulas.drawnExperts(e, k, b)]",
            list(asked),
        )
        assert touched == pytest.approx(expert_bytes.experts_touched(*asked), rel=1e-12)
        assert drawn == expert_bytes.drawn_experts(*asked)
    host.locator('[data-input="batch"]').focus()
    host.page.keyboard.press("End")
    read = float(host.locator('dd[data-result="drawn"]').get_attribute("data-value"))
    assert read == 8, "256 tokens of Mixtral's two choices read all eight experts"


def test_the_stretch_of_bad_releases_is_that_of_its_document(widget):
    host = widget("release-bisect")
    for bug in release_bisect.document()["bugs"]:
        said = [verdict for _, verdict in bug["verdicts"]]
        bad = [version for version, _ in bug["verdicts"]].index(bug["known"])
        for step in (1, 2, 3, 5):
            asked = {at: said[at] for at in range(0, len(said), step) if at != bad}
            found = host.page.evaluate(
                "([asked, count, bad]) => CourseWidgets.formulas.known(asked, count, bad)",
                [list(asked.items()), len(said), bad],
            )
            assert found == release_bisect.known(asked, len(said), bad), (bug["number"], step)


def test_asking_releases_ends_in_both_ends_of_the_bug(widget):
    host = widget("release-bisect")
    while (buttons := host.locator("button[data-at]:not([disabled])")).count():
        buttons.first.click()
    assert host.locator("[data-done]").get_attribute("data-done") == "true"
    (bug, *_) = release_bisect.document()["bugs"]
    assert f"releases asked: bad from {bug['verdicts'][0][0]}" in host.inner_text()
