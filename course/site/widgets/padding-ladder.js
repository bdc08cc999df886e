/* Capture sizes to drag, under the decode steps of a run. The document is that of
 * course/site/widgets/padding_ladder.py. */
"use strict";

/** The smallest size that holds so many tokens, null above the largest. */
CourseWidgets.formulas.rung = (tokens, sizes) => {
    const fit = sizes.filter((size) => size >= tokens);
    return fit.length ? Math.min(...fit) : null;
};

/** The same as `cost` there. */
CourseWidgets.formulas.ladderCost = (counts, sizes) => {
    const found = { graphs: new Set(sizes).size, rows: 0, padded: 0, without: 0 };
    for (const [tokens, steps] of counts) {
        const size = CourseWidgets.formulas.rung(tokens, sizes);
        if (size === null) found.without += steps;
        else {
            found.rows += steps * tokens;
            found.padded += steps * (size - tokens);
        }
    }
    return found;
};

CourseWidgets.mount("padding-ladder", (data) => {
    const { el, svg, labelled, choice, formulas } = CourseWidgets;
    const { ask, grip, keepKeys, facts } = CourseDecide;
    const box = el("section", { class: "widget-box decide", "aria-label": "The padding ladder" });
    const W = 400, L = 30, T = 8, H = 150, LOW = T + H + 32, DEEP = 40;
    const x = (tokens) => L + ((W - L - 10) * tokens) / data.most;
    const y = (rows) => T + H * (1 - rows / data.most);
    let sizes = [];
    const drawn = svg("g", {});
    const grips = svg("g", {});
    const plot = svg("svg", { class: "decide-plot", role: "group", "aria-label": "Rows of a step by its tokens; capture sizes to drag",
        viewBox: `0 0 ${W} ${LOW + DEEP + 16}` }, drawn, grips);
    const ladder = choice([...Object.keys(data.ladders), "yours"], null, () => ladder.value in data.ladders && load(data.ladders[ladder.value]));
    ladder.dataset.input = "ladder";
    const text = el("input", { type: "text", "data-input": "sizes", inputmode: "numeric", class: "ladder-sizes", onchange: () => {
        const typed = text.value.split(/[\s,]+/).filter(Boolean).map(Number);
        if (typed.length && typed.every((n) => Number.isInteger(n) && n >= 1 && n <= data.most)) load(typed);
        else said.textContent = `Need whole numbers from 1 to ${data.most}.`;
    } });
    const at = el("input", { type: "range", min: 1, max: data.most, value: 5, "data-input": "at", oninput: () => show() });
    const atText = el("output", {});
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const results = el("dl", { class: "calc-results" });

    function load(to) {
        sizes = [...to].sort((a, b) => a - b);
        grips.replaceChildren(...sizes.map((size, i) => grip({
            key: i, name: `Capture size ${i + 1}`, least: 1, most: data.most, step: 1, value: size, reach: 10, sideways: true,
            place: (value) => [x(value), T + H + 5], read: (px) => ((px - L) * data.most) / (W - L - 10),
            moved: (value) => { sizes[i] = value; show(); },
        }).node));
        show();
    }

    function show() {
        const tokens = Number(at.value);
        const size = formulas.rung(tokens, sizes);
        const found = formulas.ladderCost(data.counts, sizes);
        const most = Math.max(...data.counts.map(([, steps]) => steps));
        const parts = [];
        for (let n = 1; n <= data.most; n += 1) {
            const up = formulas.rung(n, sizes);
            const css = up === null ? "ladder-none" : "ladder-pad";
            const width = x(1) - x(0) - 0.6;
            parts.push(svg("rect", { x: x(n) - width / 2, width, y: y(n), height: T + H - y(n), class: "ladder-rows" }));
            if (up === null) parts.push(svg("rect", { x: x(n) - width / 2, width, y: T, height: H - (T + H - y(n)), class: css }));
            else parts.push(svg("rect", { x: x(n) - width / 2, width, y: y(up), height: y(n) - y(up), class: css }));
        }
        for (const [n, steps] of data.counts) {
            parts.push(svg("rect", { x: x(n) - 2.2, width: 4.4, y: LOW + DEEP * (1 - steps / most), height: (DEEP * steps) / most, class: "decide-read" },
                svg("title", {}, `${steps} steps of ${n}`)));
        }
        parts.push(svg("line", { x1: x(tokens), x2: x(tokens), y1: T, y2: LOW + DEEP, class: "decide-max" }),
            svg("line", { x1: L, x2: W - 6, y1: LOW + DEEP, y2: LOW + DEEP, class: "decide-axis" }),
            svg("text", { x: 0, y: T + 10 }, `${data.most} rows`), svg("text", { x: 0, y: LOW - 3 }, `steps, at most ${most}`),
            ...[1, 15, 30, 45].map((n) => svg("text", { x: x(n), y: LOW + DEEP + 14, "text-anchor": "middle" }, `${n}`)),
            svg("text", { x: W, y: LOW + DEEP + 14, "text-anchor": "end" }, "60 tokens"));
        drawn.replaceChildren(...parts);
        text.value = [...new Set(sizes)].sort((a, b) => a - b).join(" ");
        const named = Object.keys(data.ladders).find((name) => `${data.ladders[name]}` === `${[...sizes].sort((a, b) => a - b)}`);
        ladder.value = named || "yours";
        atText.textContent = `${tokens}`;
        said.textContent = size === null ? `${tokens} tokens are above the top rung: no full graph.`
            : `${tokens} tokens run as ${size}: ${size - tokens} pad rows, ${((100 * (size - tokens)) / tokens).toFixed(1)} % more.`;
        said.dataset.rung = size;
        results.replaceChildren(...facts([
            ["full graphs", "graphs", found.graphs, `${found.graphs}`],
            ["pad rows", "padded", found.padded, `${found.padded} (${found.rows ? ((100 * found.padded) / found.rows).toFixed(1) : 0} %)`],
            ["steps without", "without", found.without, `${found.without} of ${data.counts.reduce((sum, [, n]) => sum + n, 0)}`],
        ]));
    }

    const legend = el("p", { class: "widget-legend" }, [["ladder-rows", "tokens of the step"], ["ladder-pad", "pad rows"],
        ["ladder-none", "no full graph"], ["decide-read", "steps of the run"]].map(([css, words]) =>
        el("span", {}, el("i", { class: `key-${css}`, "aria-hidden": "true" }), words)));
    keepKeys(box);
    box.append(ask(data.questions, (posed) => { at.value = posed.at; load(posed.sizes); }),
        el("div", { class: "widget-form" }, labelled("Ladder", ladder), labelled("Capture sizes: type, or drag the rings", text),
            labelled("Tokens of a step", at, atText)),
        said, plot, legend, results);
    load(Object.values(data.ladders)[0]);
    return box;
});
