/* Which experts a decode step reads. The document is that of course/site/widgets/expert_bytes.py. */
"use strict";

CourseWidgets.formulas.expertsTouched = (experts, topK, batch) =>
    experts * (1 - (1 - topK / experts) ** batch);

CourseWidgets.formulas.drawnExperts = (experts, topK, batch) => {
    let state = 7;
    return Array.from({ length: batch }, () => {
        const left = Array.from({ length: experts }, (_, id) => id);
        return Array.from({ length: topK }, () => {
            state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
            return left.splice((state >>> 8) % left.length, 1)[0];
        });
    });
};

CourseWidgets.mount("expert-bytes", (data) => {
    const { el, svg, labelled, choice, formulas, plural, questions } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "Experts read by a decode step" });
    const batches = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256];
    const sizes = [4, 8, 16, 32, 60, 64, 128, 256];
    const tops = [1, 2, 3, 4, 6, 8];
    const range = (values, value) => el("input",
        { type: "range", min: 0, max: values.length - 1, value: values.indexOf(value), oninput: update });
    const model = choice(Object.keys(data.models), null, take);
    const gpu = choice(Object.keys(data.gpus), "H100 SXM", update);
    const experts = range(sizes, 8);
    const topK = range(tops, 2);
    const batch = range(batches, 4);
    const texts = { experts: el("output"), topK: el("output"), batch: el("output") };
    Object.entries({ model, gpu, experts, topK, batch }).forEach(([id, field]) => { field.dataset.input = id; });
    const plot = svg("svg", { viewBox: "0 0 640 200", role: "img", class: "roof-plot" });
    const results = el("dl", { class: "calc-results" });
    const say = el("p", { class: "film-say", "aria-live": "polite" });

    function take() {
        const shape = data.models[model.value];
        experts.value = sizes.indexOf(shape.experts);
        topK.value = tops.indexOf(shape.top_k);
        update();
    }

    const posed = questions(data.questions, "Show it", (question) => {
        experts.value = sizes.indexOf(question.experts);
        topK.value = tops.indexOf(question.top_k);
        batch.value = batches.indexOf(question.batch);
        update();
    });

    function update() {
        const shape = data.models[model.value];
        const E = sizes[experts.value];
        const k = Math.min(tops[topK.value], E);
        const B = batches[batch.value];
        const tokens = formulas.drawnExperts(E, k, B);
        const loads = new Array(E).fill(0);
        tokens.flat().forEach((id) => { loads[id] += 1; });
        const drawn = loads.filter((load) => load > 0).length;
        const expected = formulas.expertsTouched(E, k, B);
        const bytes = 2 * 3 * shape.hidden * shape.inner * shape.layers;
        const columns = Math.min(E, 32);
        const side = 640 / columns;
        const high = Math.min(side, 200 / Math.ceil(E / columns), 60);
        const most = Math.max(...loads);
        plot.setAttribute("viewBox", `0 0 640 ${Math.ceil(E / columns) * high}`);
        plot.replaceChildren(
            svg("title", {}, `${drawn} of ${E} experts are read by ${plural(B, "token")} of ${plural(k, "choice")}`),
            ...loads.map((load, id) => svg("rect", {
                x: (id % columns) * side + 1, y: Math.floor(id / columns) * high + 1,
                width: side - 2, height: high - 2, rx: 2,
                class: load ? "roof-kv" : "roof-weights",
                "fill-opacity": load ? 0.35 + 0.65 * (load / most) : 0.08,
            }, svg("title", {}, `expert ${id}: ${load} of ${B * k} pairs`))));
        texts.experts.textContent = `${E}`;
        texts.topK.textContent = `${k}`;
        texts.batch.textContent = plural(B, "token");
        for (const [field, words] of [[experts, texts.experts], [topK, texts.topK], [batch, texts.batch]]) {
            field.setAttribute("aria-valuetext", words.textContent);
        }
        const milliseconds = drawn * bytes / data.gpus[gpu.value].mem_bw * 1e3;
        const shown = [
            ["read, this draw", "drawn", drawn, `${drawn} of ${E}`],
            ["on average", "touched", expected, expected.toFixed(1)],
            ["expert bytes", "bytes", drawn * bytes, `${(drawn * bytes / 1e9).toFixed(2)} GB`],
            ["reading them", "ms", milliseconds, `${milliseconds.toFixed(2)} ms`],
            ["rows of each, mean", "rows", B * k / drawn, (B * k / drawn).toFixed(1)],
        ];
        results.replaceChildren(...shown.map(([name, id, value, words]) =>
            el("div", {}, el("dt", {}, name), el("dd", { "data-result": id, "data-value": value }, words))));
        say.textContent = `A token computes ${(100 * k / E).toFixed(1)} % of the experts; `
            + `the step reads ${(100 * drawn / E).toFixed(0)} % of their bytes.`;
    }

    box.append(
        ...posed,
        el("div", { class: "widget-form wide-form" }, labelled("Expert size and layers of", model),
            labelled("GPU", gpu), labelled("Batch", batch, texts.batch),
            labelled("Experts", experts, texts.experts), labelled("Top-k", topK, texts.topK)),
        say, plot, el("p", { class: "widget-legend" }, [["expert-read", "an expert that is read; fuller: by more tokens"], ["expert-idle", "not read"]].map(([css, words]) =>
            el("span", {}, el("i", { class: css, "aria-hidden": "true" }), words))), results);
    update();
    return box;
});
