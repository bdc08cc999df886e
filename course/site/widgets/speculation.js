/* Where drafts turn from gain to loss, and a text drafted by looking up. The document is that of
 * course/site/widgets/speculation.py. */
"use strict";

/** The same as `speculation_step` there. */
CourseWidgets.formulas.speculationStep = (alpha, k, c, batch, ridge) => {
    let tokens = 0;
    for (let i = 0; i <= k; i += 1) tokens += alpha ** i;
    const verify = Math.max(1, (batch * (k + 1)) / ridge) / Math.max(1, batch / ridge);
    return { tokens, verify, speedup: tokens / (verify + k * c) };
};

/** The same as `drafted_runs` there: the longest earlier match of the end, of those the earliest. */
CourseWidgets.formulas.draftedRuns = (text, minN, maxN, k) => {
    const tokens = [...text];
    const runs = [];
    let known = 1;
    while (known < tokens.length) {
        const room = Math.min(k, tokens.length - known - 1);
        let best = 0;
        let end = 0;
        for (let place = 1; place < known; place += 1) {
            let n = 0;
            while (n < maxN && n < place && tokens[place - 1 - n] === tokens[known - 1 - n]) n += 1;
            if (n >= minN && n > best) {
                best = n;
                end = place;
            }
        }
        const drafts = best && room > 0 ? tokens.slice(end, Math.min(end + room, known)) : [];
        let accepted = 0;
        while (accepted < drafts.length && drafts[accepted] === tokens[known + accepted]) accepted += 1;
        runs.push({ drafts: drafts.join(""), accepted });
        known += accepted + 1;
    }
    return runs;
};

CourseWidgets.mount("speculation", (data) => {
    const { el, svg, labelled, choice, formulas, plural, questions, room } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "What drafts are worth" });
    const batches = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024];
    const start = data.defaults;
    const range = (id, min, max, step, value) => {
        const field = el("input", { type: "range", min, max, step, value, oninput: update });
        field.dataset.input = id;
        return field;
    };
    const gpu = choice(Object.keys(data.ridges), start.gpu, update);
    gpu.dataset.input = "gpu";
    const alpha = range("alpha", 0, 1, 0.05, start.alpha);
    const k = range("k", 0, 10, 1, start.k);
    const cost = range("c", 0, 0.5, 0.05, start.c);
    const batch = range("batch", 0, batches.length - 1, 1, batches.indexOf(start.batch));
    const said = { alpha: el("output"), k: el("output"), c: el("output"), batch: el("output") };
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const results = el("dl", { class: "calc-results" });
    const H = 280, L = 48, R = 16, T = 34, B = 44;
    const wide = room(640, () => update());
    let W = wide();
    const plot = svg("svg", { role: "img", class: "roof-plot" });
    const x = (size) => L + ((W - L - R) * Math.log2(size)) / 10;

    function draw(a, drafts, c, size, ridge) {
        W = wide();
        plot.setAttribute("viewBox", `0 0 ${W} ${H}`);
        const points = Array.from({ length: 81 }, (_, i) => 2 ** (i / 8));
        const curve = points.map((b) => formulas.speculationStep(a, drafts, c, b, ridge).speedup);
        const top = Math.max(1.5, ...curve) * 1.08;
        const y = (value) => H - B - ((H - T - B) * value) / top;
        const text = (px, py, words, anchor = "middle") =>
            svg("text", { x: px, y: py, "text-anchor": anchor }, words);
        const parts = [1, 4, 16, 64, 256, 1024].flatMap((tick) => [
            svg("line", { x1: x(tick), x2: x(tick), y1: T, y2: H - B, class: "roof-grid" }),
            text(x(tick), H - B + 16, `${tick}`)]);
        for (let tick = 0; tick < top; tick += top > 4 ? 1 : 0.5) parts.push(text(L - 8, y(tick) + 4, `${tick}`, "end"));
        const here = formulas.speculationStep(a, drafts, c, size, ridge).speedup;
        parts.push(text(0, 14, "times as fast", "start"), text((L + W - R) / 2, H - 8, "requests in a batch; the line at 1 is break-even"),
            svg("line", { x1: L, x2: W - R, y1: y(1), y2: y(1), class: "roof-grid" }),
            svg("polyline", { class: "roof-line", points: points.map((b, i) => `${x(b).toFixed(1)},${y(curve[i]).toFixed(1)}`).join(" ") }),
            svg("circle", { cx: x(size), cy: y(here), r: 6, class: here > 1 ? "roof-weights" : "roof-kv" },
                svg("title", {}, `batch ${size}: ${here.toFixed(2)} times as fast`)));
        plot.replaceChildren(svg("title", {}, "Speedup over the batch"), ...parts);
    }

    function update() {
        const [a, drafts, c, size] = [Number(alpha.value), Number(k.value), Number(cost.value), batches[batch.value]];
        const ridge = data.ridges[gpu.value];
        said.alpha.textContent = a.toFixed(2);
        said.k.textContent = `${drafts} a run`;
        said.c.textContent = `${c.toFixed(2)} steps`;
        said.batch.textContent = plural(size, "request");
        batch.setAttribute("aria-valuetext", said.batch.textContent);
        const step = formulas.speculationStep(a, drafts, c, size, ridge);
        let best = 0;
        const gain = (n) => formulas.speculationStep(a, n, c, size, ridge).speedup;
        for (let n = 1; n <= 20; n += 1) if (gain(n) > gain(best)) best = n;
        draw(a, drafts, c, size, ridge);
        results.replaceChildren(...[
            ["tokens a run", "tokens", step.tokens.toFixed(2), step.tokens],
            ["a run takes", "verify", `${(step.verify + drafts * c).toFixed(2)} steps`, step.verify],
            ["times as fast", "speedup", step.speedup.toFixed(2), step.speedup],
            ["best k", "best_k", `${best}`, best],
        ].map(([name, id, words, value]) =>
            el("div", {}, el("dt", {}, name), el("dd", { "data-result": id, "data-value": value }, words))));
        const free = size * (drafts + 1) <= ridge;
        verdict.textContent = drafts === 0 ? "No drafts: plain decoding."
            : `${step.speedup > 1 ? "A gain." : step.speedup === 1 ? "Neither gain nor loss." : "A loss."} `
            + (free ? "All rows fit beside the reading of the weights: to verify costs one step."
                : `${size * (drafts + 1)} rows are more than the ridge of ${ridge.toFixed(0)}: verification costs ${step.verify.toFixed(2)} steps.`);
    }

    const posed = questions(data.questions, "Show it", (question) => {
        gpu.value = start.gpu;
        alpha.value = question.alpha;
        k.value = question.k;
        cost.value = question.c;
        batch.value = batches.indexOf(question.batch);
        update();
        look();
    });

    const words = el("textarea", { rows: 4, "aria-label": "A text", oninput: look });
    words.value = start.text;
    words.dataset.input = "text";
    const shown = el("p", { class: "spec-text", "data-result": "runs", "aria-live": "polite" });
    const counted = el("p", { class: "film-say" });

    function look() {
        const text = [...words.value].slice(0, 400);
        const runs = formulas.draftedRuns(text.join(""), 2, 5, Math.max(1, Number(k.value)));
        const visible = (token) => (token === "\n" ? "↵\n" : token);
        const parts = [el("span", { class: "spec-own" }, visible(text[0] ?? ""))];
        let known = 1;
        for (const run of runs) {
            const drafts = [...run.drafts];
            for (const token of drafts.slice(0, run.accepted)) parts.push(el("span", { class: "spec-kept" }, visible(token)));
            known += run.accepted;
            for (const token of drafts.slice(run.accepted)) parts.push(el("del", { class: "spec-lost" }, visible(token).trimEnd() || "·"));
            if (known < text.length) parts.push(el("span", { class: "spec-own" }, visible(text[known])));
            known += 1;
        }
        shown.replaceChildren(...parts);
        const kept = runs.reduce((sum, run) => sum + run.accepted, 0);
        const made = runs.reduce((sum, run) => sum + [...run.drafts].length, 0);
        counted.textContent = `${Math.max(0, text.length - 1)} characters in ${runs.length} runs; ${kept} of ${made} drafts kept.`;
        shown.dataset.value = JSON.stringify(runs);
    }
    k.addEventListener("input", look);
    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });

    box.append(
        ...posed,
        el("div", { class: "widget-form wide-form" }, labelled("GPU", gpu), labelled("Accepted: alpha", alpha, said.alpha),
            labelled("Drafts k", k, said.k), labelled("One draft costs c", cost, said.c),
            labelled("Batch", batch, said.batch)),
        verdict, plot, results,
        el("p", {}, "A text of your own, as if the model said it, drafted by looking up 2 to 5 characters: "
            + "green was drafted and kept, struck out was drafted in vain, the rest the model said itself."),
        words, shown, counted);
    update();
    look();
    return box;
});
