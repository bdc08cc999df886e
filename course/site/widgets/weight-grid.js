/* Weights to drag, and the codes they snap to; and what the shipped model writes in each format. The document is that
 * of course/site/widgets/weight_grid.py. */
"use strict";

/** The same as `snapped` there; `nearest` is that of code-points.js. Returns values back, and the scale of each weight. */
CourseWidgets.formulas.snapped = (points, weights, shared, group) => {
    const { nearest } = CourseWidgets.formulas;
    const all = weights.flat();
    const size = { tensor: all.length, channel: weights[0].length, group }[shared];
    const back = [];
    const scales = [];
    for (let start = 0; start < all.length; start += size) {
        const part = all.slice(start, start + size);
        const scale = Math.max(...part.map(Math.abs)) / points[points.length - 1] || 1;
        for (const w of part) {
            back.push(Math.sign(w) * points[nearest(Math.abs(w) / scale, points)] * scale);
            scales.push(scale);
        }
    }
    const rows = (list) => weights.map((row, r) => list.slice(r * row.length, (r + 1) * row.length));
    return { back: rows(back), scales: rows(scales) };
};

CourseWidgets.mount("weight-grid", (data) => {
    const { el, svg, labelled, formulas } = CourseWidgets;
    const { ask, grip, keepKeys } = CourseDecide;
    const box = el("section", { class: "widget-box decide", "aria-label": "Weights that snap to codes" });
    const RANGES = [0.075, 0.15, 0.3, 0.6];
    const W = 400, CELL = 19.5, L = 8, ROW = 76, HALF = 30;
    const columns = data.weights[0].length;
    let weights = data.weights.map((row) => [...row]);
    let ranges = [];
    const middle = (r) => ROW * r + 38;
    const x = (c) => L + CELL * (c + 0.5);
    const y = (r, value) => middle(r) - (HALF * value) / ranges[r];
    const drawn = svg("g", {});
    const grips = svg("g", {});
    const plot = svg("svg", { viewBox: `0 0 ${W} ${ROW * weights.length}`, class: "decide-plot", role: "group",
        "aria-label": "Four rows of weights to drag" }, drawn, grips);
    const select = (id, entries) => el("select", { "data-input": id, onchange: show }, entries.map(([value, words]) => el("option", { value }, words)));
    const format = select("format", Object.keys(data.points).map((name) => [name, name]));
    const shared = select("shared", Object.entries(data.shared).map(([value, words]) => [value, value === "group" ? `a group of ${data.group}` : words]));
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const wrote = el("div", { class: "snap-texts" });

    function settle() {
        ranges = weights.map((row) => RANGES.find((range) => range >= 1.02 * Math.max(...row.map(Math.abs))) || data.most);
        knobs.forEach((knob, i) => knob.set(weights[Math.floor(i / columns)][i % columns]));
        show();
    }
    ranges = weights.map(() => data.most);
    const knobs = weights.flatMap((row, r) => row.map((value, c) => grip({
        key: `${r}-${c}`, name: `Weight ${c + 1} of row ${r + 1}`, least: -data.most, most: data.most, step: 0.001, value, reach: 9,
        place: (w) => [x(c), y(r, w)],
        read: (_, py) => Math.max(-ranges[r], Math.min(ranges[r], ((middle(r) - py) * ranges[r]) / HALF)),
        moved: (w) => { weights[r][c] = w; show(); },
        settled: settle,
    })));
    grips.append(...knobs.map((knob) => knob.node));

    function load(to) {
        weights = to.map((row) => [...row]);
        settle();
    }

    function drawTexts() {
        const shipped = data.texts["as shipped"];
        const text = data.texts[`${format.value} ${shared.value}`];
        let kept = 0;
        while (kept < text.length && text[kept] === shipped[kept]) kept += 1;
        const figure = (title, ...parts) => el("figure", {}, el("figcaption", {}, el("b", {}, title)),
            el("p", {}, el("span", { class: "live-prompt" }, data.prompt), ...parts));
        const words = shared.value === "group" ? `groups of ${data.group_of_text}` : data.shared[shared.value];
        wrote.replaceChildren(figure("byte-llama as shipped writes", shipped),
            figure(`with every layer in ${format.value}, a scale for ${words}`, text.slice(0, kept), kept < text.length ? el("mark", {}, text.slice(kept)) : null));
        wrote.dataset.same = kept === text.length;
    }

    function show() {
        const points = data.points[format.value];
        const found = formulas.snapped(points, weights, shared.value, data.group);
        const parts = [];
        let lost = 0;
        weights.forEach((row, r) => {
            const spans = shared.value === "group" ? Array.from({ length: columns / data.group }, (_, g) => [g * data.group, data.group]) : [[0, columns]];
            for (const [from, length] of spans) {
                const scale = found.scales[r][from];
                const lines = points.flatMap((p) => (p ? [p * scale, -p * scale] : [0])).filter((v) => Math.abs(v) <= ranges[r]);
                let before = Infinity; // of lines that lie too near to each other some are left out
                for (const v of lines.sort((a, b) => a - b)) {
                    if (Math.abs(y(r, v) - before) < 1.6) continue;
                    before = y(r, v);
                    parts.push(svg("line", { x1: L + CELL * from + 1, x2: L + CELL * (from + length) - 1, y1: y(r, v), y2: y(r, v), class: "snap-grid" }));
                }
                if (from) parts.push(svg("line", { x1: L + CELL * from, x2: L + CELL * from, y1: middle(r) - HALF, y2: middle(r) + HALF, class: "snap-group" }));
            }
            let wrong = 0;
            let norm = 0;
            let zeros = 0;
            row.forEach((w, c) => {
                const b = found.back[r][c];
                wrong += (b - w) ** 2;
                norm += w * w;
                if (b === 0) zeros += 1;
                parts.push(svg("line", { x1: x(c), x2: x(c), y1: y(r, w), y2: y(r, b), class: "snap-error" }),
                    svg("rect", { x: x(c) - 7, width: 14, y: y(r, b) - 1.8, height: 3.6, class: b === 0 ? "snap-lost" : "snap-code" }));
            });
            lost += zeros;
            const error = Math.sqrt(wrong / norm);
            parts.push(svg("text", { x: L + CELL * columns + 6, y: middle(r) - 14 }, `to ±${ranges[r]}`),
                svg("text", { x: L + CELL * columns + 6, y: middle(r) + 4, "data-error": error, "data-row": r }, `error ${(100 * error).toFixed(error < 0.1 ? 1 : 0)} %`),
                svg("text", { x: L + CELL * columns + 6, y: middle(r) + 20, "data-zeros": zeros, "data-row": r }, `${zeros} at 0`));
        });
        drawn.replaceChildren(...parts);
        const scales = new Set(found.scales.flat()).size;
        said.textContent = `${scales} scale${scales === 1 ? "" : "s"} for ${columns * weights.length} weights; ${lost} of them become 0. Drag a ring far up: who pays?`;
        drawTexts();
    }

    const spike = el("button", { type: "button", onclick: () => { weights[3][0] = data.most; settle(); } }, "Make the last row's first weight loud");
    const reset = el("button", { type: "button", onclick: () => load(data.weights) }, "Put the shipped weights back");
    const legend = el("p", { class: "widget-legend" }, [["○", "weight", "a weight"], ["▬", "code", "its code, red at 0"], ["—", "value", "a value of the format"]].map(([mark, css, words]) =>
        el("span", {}, el("b", { class: `snap-mark-${css}`, "aria-hidden": "true" }, `${mark} `), words)));
    keepKeys(box);
    box.append(ask(data.questions, (posed) => { format.value = posed.format; shared.value = posed.shared; load(posed.weights); }),
        el("div", { class: "widget-form" }, labelled("Format", format), labelled("One scale for", shared)),
        said, plot, legend, el("p", { class: "decide-choices" }, spike, reset), wrote);
    settle();
    return box;
});
