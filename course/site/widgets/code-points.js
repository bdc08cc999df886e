/* One row of real weights on the values a format can say. The document is that of course/site/widgets/code_points.py. */
"use strict";

/** The same rounding as `round_to_points`: index of the nearest point, ties to the even index. */
CourseWidgets.formulas.nearest = (size, points) => {
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (points[middle] < size) low = middle;
        else high = middle;
    }
    const border = (points[low] + points[high]) / 2;
    return size > border || (size === border && high % 2 === 0) ? high : low;
};

/** The same as `on_grid`, with what is drawn: the weights, their values back, and the scales. */
CourseWidgets.formulas.onGrid = (data, row, name, size, spike) => {
    const { nearest } = CourseWidgets.formulas;
    const form = data.formats[name];
    const points = form.points;
    const e4m3 = data.formats.E4M3.points;
    const loud = row.reduce((best, w, i) => (Math.abs(w) > Math.abs(row[best]) ? i : best), 0);
    const weights = row.map((w, i) => (i === loud ? w * spike : w));
    const whole = (448 * 6) / Math.abs(weights[loud]);
    const back = [];
    const scales = [];
    for (let start = 0; start < weights.length; start += size) {
        const group = weights.slice(start, start + size);
        const largest = Math.max(...group.map(Math.abs));
        let scale = largest / points[points.length - 1];
        if (form.rule === "power of two") scale = 2 ** (Math.floor(Math.log2(largest)) - 2);
        if (form.rule === "E4M3") scale = e4m3[nearest(Math.min((whole * largest) / 6, 448), e4m3)] / whole;
        scales.push(scale);
        for (const w of group) back.push(Math.sign(w) * points[nearest(Math.abs(w) / scale, points)] * scale);
    }
    let wrong = 0;
    let norm = 0;
    let zeros = 0;
    weights.forEach((w, i) => {
        if (i === loud) return;
        wrong += (back[i] - w) ** 2;
        norm += w * w;
        if (back[i] === 0) zeros += 1;
    });
    return {
        weights, back, scales, loud, error: Math.sqrt(wrong / norm), zeros,
        bits: form.bits + data.scale_bits[form.rule] / size,
    };
};

CourseWidgets.mount("code-points", (data) => {
    const { el, svg, labelled, choice, formulas, room } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "Code-point explorer" });
    const named = (id, field) => { field.dataset.input = id; return field; };
    const row = named("row", choice(Object.keys(data.rows), null, update));
    const format = named("format", choice(Object.keys(data.formats), "int4", update));
    const sizes = [[256, "the whole row"], [128, "128"], [32, "32"], [16, "16"]];
    const size = named("size", el("select", { onchange: update },
        sizes.map(([value, words]) => el("option", { value }, words))));
    const spike = named("spike", el("input", { type: "range", min: 1, max: 20, step: 1, value: 1, oninput: update }));
    const spikeText = el("output");
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const results = el("dl", { class: "calc-results" });
    const TOP = 8, PAD = 12;
    const wide = room(640, () => update());
    const plot = svg("svg", { role: "img", class: "roof-plot" });

    function draw(found, points, perGroup, name) {
        const W = wide();
        const groups = found.scales.length;
        const lane = groups === 1 ? 64 : groups === 2 ? 44 : groups === 8 ? 24 : 16;
        const largest = Math.max(...found.weights.map(Math.abs));
        const x = (value) => (PAD + (W - 2 * PAD) * ((value / largest + 1) / 2)).toFixed(1);
        const stroke = (values, y, length) => values.map((v) => `M${x(v)} ${y}v${length}`).join("");
        const parts = [svg("title", {}, `${found.weights.length} weights above the values of ${name}, per scale`)];
        found.scales.forEach((scale, g) => {
            const top = TOP + g * lane;
            const half = (lane - 4) / 2;
            const own = found.weights.map((w, i) => [w, found.back[i]]).slice(g * perGroup, (g + 1) * perGroup);
            const grid = points.flatMap((p) => (p ? [p * scale, -p * scale] : [0])).filter((v) => Math.abs(v) <= largest);
            parts.push(
                svg("path", { d: stroke(own.filter(([, b]) => b !== 0).map(([w]) => w), top, half), class: "code-kept" }),
                svg("path", { d: stroke(own.filter(([, b]) => b === 0).map(([w]) => w), top, half), class: "code-lost" }),
                svg("path", { d: stroke(grid, top + half, half), class: "code-point" }));
        });
        const bottom = TOP + groups * lane;
        [[-largest, "start"], [0, "middle"], [largest, "end"]].forEach(([value, anchor]) => parts.push(
            svg("text", { x: x(value), y: bottom + 14, "text-anchor": anchor }, value.toFixed(2))));
        plot.setAttribute("viewBox", `0 0 ${W} ${bottom + 20}`);
        plot.replaceChildren(...parts);
    }

    function update() {
        const form = data.formats[format.value];
        size.disabled = Boolean(form.size);
        if (form.size) size.value = form.size;
        const perGroup = Number(size.value);
        const factor = Number(spike.value);
        spikeText.textContent = factor === 1 ? "as it is" : `${factor} times`;
        spike.setAttribute("aria-valuetext", spikeText.textContent);
        const found = formulas.onGrid(data, data.rows[row.value], format.value, perGroup, factor);
        draw(found, form.points, perGroup, format.value);
        const others = found.weights.length - 1;
        const shown = [
            ["error of others", "error", `${(100 * found.error).toFixed(found.error < 0.1 ? 2 : 1)} %`],
            ["lost to 0", "zeros", `${found.zeros} of ${others}`],
            ["bits per weight", "bits", found.bits.toFixed(found.bits % 1 ? 4 : 0)],
        ];
        results.replaceChildren(...shown.map(([words, id, text]) =>
            el("div", {}, el("dt", {}, words), el("dd", { "data-result": id, "data-value": found[id] }, text))));
        const before = formulas.onGrid(data, data.rows[row.value], format.value, perGroup, 1).error;
        const payers = perGroup === found.weights.length ? "All others share its scale, and pay"
            : `The ${perGroup - 1} that share its scale pay`;
        verdict.textContent = factor === 1
            ? "Make the largest weight larger, and see who pays for it."
            : `Before, the others erred by ${(100 * before).toFixed(before < 0.1 ? 2 : 1)} %. `
                + (found.error < 1.1 * before ? "They hardly notice." : `${payers}.`);
    }

    const legend = el("p", { class: "widget-legend" }, [["code-kept", "a weight"], ["code-lost", "a weight that becomes 0"],
        ["code-point", "a value of the format"]].map(([css, words]) =>
        el("span", {}, el("i", { class: css, "aria-hidden": "true" }), words)));
    box.append(
        el("div", { class: "widget-form wide-form" }, labelled("Weights of byte-llama", row), labelled("Format", format),
            labelled("Weights per scale", size), labelled("The largest weight", spike, spikeText)),
        verdict, plot, legend, results);
    update();
    return box;
});
