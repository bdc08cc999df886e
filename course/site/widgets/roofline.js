/* A decode step on a roofline. The document is that of course/site/widgets/roofline.py. */
"use strict";

CourseWidgets.formulas.decodeStep = (shape, gpu, batch, context) => {
    const weightBytes = 2 * shape.parameters;
    const flops = batch * (2 * shape.parameters + shape.attention_flops * context);
    const kvBytes = batch * context * shape.kv_bytes_per_token;
    const seconds = Math.max(flops / gpu.peak_flops, (weightBytes + kvBytes) / gpu.mem_bw);
    return {
        flops, weight_bytes: weightBytes, kv_bytes: kvBytes, intensity: flops / (weightBytes + kvBytes),
        ridge: gpu.peak_flops / gpu.mem_bw, seconds, tokens_per_s: batch / seconds,
    };
};

CourseWidgets.mount("roofline", (data) => {
    const { el, svg, count, labelled, choice, formulas, plural, room } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "Roofline explorer" });
    const batches = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024];
    const contexts = [0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072];
    const range = (values, value) => el("input",
        { type: "range", min: 0, max: values.length - 1, value: values.indexOf(value), oninput: update });
    const model = choice(Object.keys(data.models), null, update);
    const gpu = choice(Object.keys(data.gpus), "A100 80 GB", update);
    const batch = range(batches, 64);
    const context = range(contexts, 2048);
    const batchText = el("output");
    const contextText = el("output");
    Object.entries({ model, gpu, batch, context }).forEach(([id, field]) => { field.dataset.input = id; });
    const results = el("dl", { class: "calc-results" });
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });

    const H = 320, L = 64, R = 16, T = 16, B = 48;
    const wide = room(640, () => update());
    let W = wide();
    const x = (intensity) => L + (W - L - R) * (Math.log10(intensity / 0.5) / 4);
    const plot = svg("svg", { role: "img", class: "roof-plot" });
    const text = (px, py, words, anchor = "middle", css = "") =>
        svg("text", { x: px, y: py, "text-anchor": anchor, class: css }, words);

    function draw(shape, card, chosen, ctx, step) {
        W = wide();
        plot.setAttribute("viewBox", `0 0 ${W} ${H}`);
        const top = Math.log10(card.peak_flops * 2);
        const y = (flops) => H - B - (H - T - B) * ((Math.log10(flops) - top + 3.4) / 3.4);
        const roof = (intensity) => Math.min(card.peak_flops, intensity * card.mem_bw);
        const at = (intensity) => `${x(intensity).toFixed(1)},${y(roof(intensity)).toFixed(1)}`;
        const parts = [];
        for (const tick of [1, 10, 100, 1000]) {
            parts.push(svg("line", { x1: x(tick), x2: x(tick), y1: T, y2: H - B, class: "roof-grid" }),
                text(x(tick), H - B + 16, `${tick}`));
        }
        for (let power = Math.ceil(top - 3.4); power <= top; power += 1) {
            const tick = 10 ** power;
            parts.push(svg("line", { x1: L, x2: W - R, y1: y(tick), y2: y(tick), class: "roof-grid" }),
                text(L - 6, y(tick) + 4, tick >= 1e12 ? `${tick / 1e12} T` : `${tick / 1e9} G`, "end"));
        }
        parts.push(text(L - 6, T - 4, "FLOP/s", "end"), text((L + W - R) / 2, H - 8, "arithmetic intensity, FLOP per byte"),
            svg("polyline", { points: [0.5, step.ridge, 5000].map(at).join(" "), class: "roof-line" }),
            text(x(step.ridge), y(card.peak_flops) - 6, `ridge ${step.ridge.toFixed(0)}`, "end"));
        for (const [ctxOf, css] of [[0, "roof-weights"], [ctx, "roof-kv"]]) {
            for (const size of batches) {
                const { intensity } = formulas.decodeStep(shape, card, size, ctxOf);
                const big = size === chosen;
                parts.push(svg("circle", { cx: x(intensity), cy: y(roof(intensity)), r: big ? 7 : 3.5, class: css },
                    svg("title", {}, `batch ${size}, context ${ctxOf}: ${intensity.toFixed(1)} FLOP/B`)));
            }
        }
        parts.push(svg("circle", { cx: W - R - 190, cy: H - B - 40, r: 4, class: "roof-weights" }),
            text(W - R - 180, H - B - 36, "weights only", "start"),
            svg("circle", { cx: W - R - 190, cy: H - B - 20, r: 4, class: "roof-kv" }),
            text(W - R - 180, H - B - 16, `with ${plural(ctx, "token")} of KV each`, "start"));
        plot.replaceChildren(svg("title", {}, "Decode steps of growing batch on the roofline"), ...parts);
    }

    function update() {
        const shape = data.models[model.value];
        const card = data.gpus[gpu.value];
        const size = batches[batch.value];
        const ctx = contexts[context.value];
        batchText.textContent = plural(size, "request");
        contextText.textContent = `${plural(ctx, "token")} each`;
        batch.setAttribute("aria-valuetext", batchText.textContent);
        context.setAttribute("aria-valuetext", contextText.textContent);
        const step = formulas.decodeStep(shape, card, size, ctx);
        draw(shape, card, size, ctx, step);
        const shown = [
            ["intensity", "intensity", `${step.intensity.toFixed(1)} FLOP/B`],
            ["weights read", "weight_bytes", `${(step.weight_bytes / 1e9).toFixed(2)} GB`],
            ["KV read", "kv_bytes", `${(step.kv_bytes / 1e9).toFixed(2)} GB`],
            ["shortest step", "seconds", `${(step.seconds * 1e3).toFixed(step.seconds < 1e-3 ? 4 : 2)} ms`],
            ["at most", "tokens_per_s", `${count(step.tokens_per_s)} tokens/s`],
        ];
        results.replaceChildren(...shown.map(([name, id, words]) =>
            el("div", {}, el("dt", {}, name), el("dd", { "data-result": id, "data-value": step[id] }, words))));
        const limit = step.intensity < step.ridge ? "memory" : "arithmetic";
        const share = step.kv_bytes / (step.kv_bytes + step.weight_bytes);
        const never = (shape.attention_flops * ctx + 2 * shape.parameters) / (ctx * shape.kv_bytes_per_token);
        const bytes = step.weight_bytes + step.kv_bytes;
        const over = bytes > card.gib * 2 ** 30
            ? ` It does not fit: the card holds ${card.gib} GiB.` : "";
        verdict.textContent = `Bound by ${limit}. The KV cache is ${(100 * share).toFixed(0)} % of the bytes.`
            + (ctx && never < step.ridge
                ? ` At this context no batch gets past ${never.toFixed(0)} FLOP per byte.` : "") + over;
    }

    box.append(
        el("div", { class: "widget-form" }, labelled("Model, 16 bits", model), labelled("GPU", gpu),
            labelled("Batch", batch, batchText), labelled("Context", context, contextText)),
        verdict, plot, results);
    update();
    return box;
});
