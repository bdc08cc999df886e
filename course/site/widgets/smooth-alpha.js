/* SmoothQuant's alpha: loud channels of X, and who gets their size. The document is that of
 * course/site/widgets/smooth_alpha.py. */
"use strict";

/** The same as `smoothed` there, for X with its loud channels `times` as loud; alpha null is no smoothing. */
CourseWidgets.formulas.smoothed = (data, times, alpha) => {
    const X = data.X.map((row) => row.map((v, c) => (data.loud.includes(c) ? v * times : v)));
    const channels = X[0].map((_, c) => c);
    const largest = (rows, c) => Math.max(...rows.map((row) => Math.abs(row[c])));
    const s = channels.map((c) => (alpha === null ? 1 : largest(X, c) ** alpha / largest(data.W, c) ** (1 - alpha)));
    const Xs = X.map((row) => row.map((v, c) => v / s[c]));
    const Ws = data.W.map((row) => row.map((v, c) => v * s[c]));
    const even = (v) => (Math.abs(v % 1) === 0.5 ? 2 * Math.round(v / 2) : Math.round(v));
    const int8 = (rows) => {
        const scale = Math.max(...rows.flat().map(Math.abs)) / 127 || 1;
        return rows.map((row) => row.map((v) => Math.max(-127, Math.min(127, even(v / scale))) * scale));
    };
    const quiet = channels.filter((c) => !data.loud.includes(c));
    const [Xq, Wq] = [int8(Xs), int8(Ws)];
    let wrong = 0;
    let norm = 0;
    Xs.forEach((row, t) => Ws.forEach((weights, o) => {
        const exact = quiet.reduce((sum, c) => sum + row[c] * weights[c], 0);
        const got = quiet.reduce((sum, c) => sum + Xq[t][c] * Wq[o][c], 0);
        wrong += (got - exact) ** 2;
        norm += exact ** 2;
    }));
    return { x: channels.map((c) => largest(Xs, c)), w: channels.map((c) => largest(Ws, c)), error: Math.sqrt(wrong / norm) };
};

CourseWidgets.mount("smooth-alpha", (data) => {
    const { el, svg, labelled, formulas } = CourseWidgets;
    const { ask, keepKeys, facts } = CourseDecide;
    const box = el("section", { class: "widget-box decide", "aria-label": "SmoothQuant's alpha" });
    const range = (id, min, max, step, value) => el("input", { type: "range", min, max, step, value, "data-input": id, oninput: () => show() });
    const loud = range("loud", 1, 80, 1, 80);
    const alpha = range("alpha", 0, 1, 0.05, 0);
    const off = el("input", { type: "checkbox", "data-input": "off", onchange: () => show() });
    off.checked = true;
    alpha.addEventListener("input", () => { off.checked = false; show(); });
    const visited = new Map(); // alphas looked at, and their errors: the curve is the reader's
    loud.addEventListener("input", () => { visited.clear(); show(); });
    const texts = { loud: el("output"), alpha: el("output") };
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const results = el("dl", { class: "calc-results" });
    const W = 400, L = 30, T = 10, H = 120, LOW = T + H + 40, DEEP = 70;
    const plot = svg("svg", { viewBox: `0 0 ${W} ${LOW + DEEP + 18}`, class: "decide-plot", role: "img" });
    const count = data.X[0].length;
    const CELL = (W - L) / count;
    const lowest = 0.5, highest = 400;
    const y = (v) => T + H * (1 - Math.log(Math.max(v, lowest) / lowest) / Math.log(highest / lowest));

    function show() {
        const times = Number(loud.value);
        const chosen = off.checked ? null : Number(alpha.value);
        const now = formulas.smoothed(data, times, chosen);
        const plain = formulas.smoothed(data, times, null);
        if (chosen !== null) visited.set(chosen, now.error);
        const curve = [...visited].sort(([a], [b]) => a - b);
        const top = Math.max(plain.error, ...curve.map(([, e]) => e));
        const px = (a) => L + (W - L - 30) * a;
        const py = (e) => LOW + DEEP * (1 - e / top);
        const parts = [svg("title", {}, "Largest value of each channel of X and W, on a logarithmic scale, and the error over alpha")];
        for (const v of [1, 10, 100]) parts.push(svg("line", { x1: L, x2: W, y1: y(v), y2: y(v), class: "snap-grid" }), svg("text", { x: 0, y: y(v) + 4 }, `${v}`));
        now.x.forEach((v, c) => {
            const left = L + CELL * c + 4;
            parts.push(svg("rect", { x: left, width: 10, y: y(v), height: T + H - y(v), class: "smooth-x" }),
                svg("rect", { x: left + 12, width: 10, y: y(now.w[c]), height: T + H - y(now.w[c]), class: "smooth-w" }),
                svg("text", { x: left + 11, y: T + H + 13, "text-anchor": "middle" }, data.loud.includes(c) ? "loud" : `${c}`));
        });
        parts.push(svg("path", { d: curve.map(([a, e], i) => `${i ? "L" : "M"}${px(a).toFixed(1)} ${py(e).toFixed(1)}`).join(""), class: "smooth-curve" }),
            svg("line", { x1: L, x2: W - 30, y1: py(plain.error), y2: py(plain.error), class: "snap-group" }),
            svg("text", { x: W - 28, y: py(plain.error) + 4 }, "off"),
            ...curve.map(([a, e]) => svg("circle", { cx: px(a), cy: py(e), r: 2.5, class: "smooth-dot" })),
            svg("text", { x: 0, y: LOW - 7 }, "error"), svg("line", { x1: L, x2: W - 30, y1: LOW + DEEP, y2: LOW + DEEP, class: "decide-axis" }),
            ...[0, 0.5, 1].map((a) => svg("text", { x: px(a), y: LOW + DEEP + 14, "text-anchor": "middle" }, `${a}`)),
            svg("text", { x: px(0.75), y: LOW + DEEP + 14, "text-anchor": "middle" }, "alpha"));
        if (chosen !== null) parts.push(svg("circle", { cx: px(chosen), cy: py(now.error), r: 5, class: "smooth-w" }));
        plot.replaceChildren(...parts);
        texts.loud.textContent = times === 1 ? "not louder" : `${times} times`;
        texts.alpha.textContent = chosen === null ? "off" : `${chosen}`;
        const percent = (e) => `${(100 * e).toFixed(1)}\u00a0%`;
        said.textContent = chosen === null ? `No smoothing: the quiet channels' part of the output errs by ${percent(now.error)}.`
            : `Alpha ${chosen}: X's loudest channel is ${Math.max(...now.x).toFixed(1)}, W's ${Math.max(...now.w).toFixed(1)}. The quiet channels' part errs by ${percent(now.error)}, ${percent(plain.error)} without.`;
        results.replaceChildren(...facts([["error now", "error", now.error, percent(now.error)], ["without smoothing", "plain", plain.error, percent(plain.error)]]));
    }

    keepKeys(box);
    box.append(ask(data.questions, (posed) => {
            loud.value = posed.loud;
            alpha.value = posed.alpha;
            off.checked = false;
            visited.clear();
            for (let i = 0; i <= 20; i += 1) visited.set(i / 20, formulas.smoothed(data, posed.loud, i / 20).error);
            show();
        }),
        el("div", { class: "widget-form" }, labelled("Two channels of X are louder", loud, texts.loud), labelled("Alpha", alpha, texts.alpha),
            el("label", { class: "decide-check" }, off, " No smoothing")),
        said, plot, el("p", { class: "widget-legend" }, [["smooth-x", "largest of a channel of X"], ["smooth-w", "of W"]].map(([css, words]) =>
            el("span", {}, el("i", { class: `key-${css}`, "aria-hidden": "true" }), words))), results);
    show();
    return box;
});
