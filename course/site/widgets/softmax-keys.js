/* Online softmax, block by block, over scores that the reader drags. The document is that of
 * course/site/widgets/softmax_keys.py. */
"use strict";

/** The same as `walk` there: one entry per block. */
CourseWidgets.formulas.softmaxWalk = (scores, values, size) => {
    let m = -Infinity;
    let denom = 0;
    let acc = 0;
    let forgotDenom = 0;
    let forgotAcc = 0;
    const steps = [];
    for (let start = 0; start < scores.length; start += size) {
        const part = scores.slice(start, start + size);
        const after = Math.max(m, ...part);
        const corr = Math.exp(m - after);
        const p = part.map((score) => Math.exp(score - after));
        const sum = p.reduce((total, w) => total + w, 0);
        const weighted = p.reduce((total, w, i) => total + w * values[start + i], 0);
        denom = denom * corr + sum;
        acc = acc * corr + weighted;
        forgotDenom += sum;
        forgotAcc += weighted;
        m = after;
        steps.push({ read: start + part.length, m, corr, denom, acc, out: acc / denom, forgot: forgotAcc / forgotDenom });
    }
    return steps;
};

/** All scores at once: the largest first, then the sums. */
CourseWidgets.formulas.softmaxTwoPass = (scores, values) => {
    const m = Math.max(...scores);
    const p = scores.map((score) => Math.exp(score - m));
    return p.reduce((total, w, i) => total + w * values[i], 0) / p.reduce((total, w) => total + w, 0);
};

CourseWidgets.mount("softmax-keys", (data) => {
    const { el, svg, labelled, choice, stepper, formulas } = CourseWidgets;
    const { ask, grip, keepKeys, facts } = CourseDecide;
    const box = el("section", { class: "widget-box decide", "aria-label": "Online softmax, key by key" });
    const { values, least, most } = data;
    const count = values.length;
    let scores = [...Object.values(data.presets)[0]];
    let place = 0;
    let go = null;

    const W = 400, L = 48, CELL = (W - L - 4) / count, TOP = 16, H = 120, LOW = TOP + H + 26, DEEP = 54;
    const x = (i) => L + CELL * (i + 0.5);
    const y = (score) => TOP + H * (1 - (score - least) / (most - least));
    const drawn = svg("g", {});
    const grips = scores.map((score, i) => grip({
        key: i, name: `Score of key ${i + 1}`, least, most, step: data.step, value: score, reach: 20,
        place: (value) => [x(i), y(value)],
        read: (_, at) => least + (1 - (at - TOP) / H) * (most - least),
        moved: (value) => { scores[i] = value; start.value = "yours"; show(); },
    }));
    const plot = svg("svg", { class: "decide-plot", role: "group", "aria-label": "Scores to drag, and weights",
        viewBox: `0 0 ${W} ${LOW + DEEP + 20}` }, drawn, grips.map((one) => one.node));
    const size = el("select", { "data-input": "size", onchange: remake },
        [1, 2, 4, 8].map((n) => el("option", { value: n }, n === 1 ? "1 key" : `${n} keys`)));
    const start = choice([...Object.keys(data.presets), "yours"], null, () => {
        if (start.value in data.presets) load(start.value);
        show();
    });
    start.dataset.input = "preset";
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const results = el("dl", { class: "calc-results" });
    const controls = el("div", {});

    function load(name) {
        start.value = name;
        scores = [...data.presets[name]];
        grips.forEach((one, i) => one.set(scores[i]));
    }

    function remake() {
        const blocks = Math.ceil(count / Number(size.value));
        const [row, move] = stepper(box, blocks + 1, "block", (at) => { place = at; show(); }, 0);
        go = move;
        controls.replaceChildren(row);
        go(0);
    }

    const short = (value) => (value === 0 ? "0" : Math.abs(value) >= 0.001 && Math.abs(value) < 1000 ? value.toFixed(4)
        : value.toExponential(1));

    function show() {
        const steps = formulas.softmaxWalk(scores, values, Number(size.value));
        const now = place ? steps[place - 1] : null;
        const before = place > 1 ? steps[place - 2] : null;
        const read = now ? now.read : 0;
        const from = before ? before.read : 0;
        const parts = [svg("text", { x: 0, y: TOP + 8 }, "score"), svg("text", { x: 0, y: LOW + 12 }, "weight")];
        scores.forEach((score, i) => {
            const css = i >= read ? "decide-unread" : i >= from ? "decide-new" : "decide-read";
            const zero = y(0);
            parts.push(svg("rect", { x: x(i) - 9, width: 18, y: Math.min(zero, y(score)), height: Math.abs(zero - y(score)), class: css }),
                svg("text", { x: x(i), y: TOP + H + 14, "text-anchor": "middle" }, `${score}`));
            if (i < read) {
                const weight = Math.exp(score - now.m);
                parts.push(svg("rect", { x: x(i) - 9, width: 18, y: LOW + DEEP * (1 - weight), height: DEEP * weight, class: css,
                    "data-weight": weight }));
            }
            parts.push(svg("text", { x: x(i), y: LOW + DEEP + 14, "text-anchor": "middle" }, `${values[i]}`));
        });
        parts.push(svg("text", { x: 0, y: LOW + DEEP + 14 }, "value"),
            svg("line", { x1: L, x2: W, y1: y(0), y2: y(0), class: "decide-axis" }),
            svg("line", { x1: L, x2: W, y1: LOW + DEEP, y2: LOW + DEEP, class: "decide-axis" }));
        if (now) {
            parts.push(svg("path", { d: `M${L} ${y(now.m)}H${x(read - 1) + CELL / 2}`, class: "decide-max" }),
                svg("text", { x: W, y: y(now.m) + (read < count ? 4 : -8), "text-anchor": "end" }, `m = ${now.m}`));
        }
        drawn.replaceChildren(...parts);
        const late = steps.at(-1);
        const done = now === late;
        said.textContent = !now ? "Nothing is read. Drag a score, then step: a key enters with weight exp(score - m)."
            : before && now.corr < 1 ? `The maximum rose from ${before.m} to ${now.m}: every weight before shrinks by ${short(now.corr)}.`
                : before ? `The maximum stays ${now.m}: corr is 1, nothing before changes.`
                    : `The first block: m is ${now.m}, and corr is 0, since nothing was before.`;
        if (done) {
            const same = Math.abs(late.forgot - late.out) < 1e-9;
            said.textContent += ` All is read: ${late.out.toFixed(4)}. ${same ? "Without corr the same." : `Without corr ${late.forgot.toFixed(4)}.`}`;
        }
        const shown = (value) => (now ? short(value) : "-");
        results.replaceChildren(...facts([
            ["corr", "corr", now?.corr, shown(now?.corr)], ["denom", "denom", now?.denom, shown(now?.denom)],
            ["acc", "acc", now?.acc, shown(now?.acc)], ["acc / denom", "out", now?.out, shown(now?.out)],
            ["in two passes", "two", formulas.softmaxTwoPass(scores, values), done ? short(formulas.softmaxTwoPass(scores, values)) : "at the end"],
        ]));
    }

    keepKeys(plot);
    box.append(
        ask(data.questions, (posed) => {
            load(posed.preset);
            size.value = posed.size;
            remake();
            go(Math.ceil(count / posed.size));
        }),
        el("div", { class: "widget-form" }, labelled("Scores", start), labelled("Read at a time", size)),
        controls, said, plot, results);
    remake();
    return box;
});
