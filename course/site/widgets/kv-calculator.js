/* KV bytes, blocks and concurrency. The document is that of course/site/widgets/kv_calculator.py. */
"use strict";

CourseWidgets.formulas.capacity = (available, bytesPerToken, blockSize, maxModelLen) => {
    const bytesPerBlock = bytesPerToken * blockSize;
    const numBlocks = Math.max(0, Math.floor(available / bytesPerBlock));
    return {
        bytes_per_block: bytesPerBlock,
        num_blocks: numBlocks,
        tokens: numBlocks * blockSize,
        max_concurrency: numBlocks / Math.ceil(maxModelLen / blockSize),
    };
};

CourseWidgets.mount("kv-calculator", (data) => {
    const { el, count, labelled, choice, formulas } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "KV cache calculator" });
    const number = (value, min, max, step) =>
        el("input", { type: "number", value, min, max, step, required: "", oninput: update });
    const named = (id, field) => { field.dataset.input = id; return field; };

    const model = named("model", choice(Object.keys(data.models), null, update));
    const gib = named("gib", number(24, 1, 4096, "any"));
    const utilization = named("utilization", number(0.92, 0.05, 1, "any"));
    const other = named("other_gib", number(1, 0, 1024, "any"));
    const weightBytes = named("weight_bytes", el("select", { onchange: update },
        [[2, "16 bits"], [1, "8 bits"], [0.5, "4 bits"]].map(([bytes, text]) => el("option", { value: bytes }, text))));
    const kvBytes = named("kv_dtype_bytes", el("select", { onchange: update },
        [[2, "16 bits"], [1, "8 bits"]].map(([bytes, text]) => el("option", { value: bytes }, text))));
    const blockSize = named("block_size", el("select", { onchange: update },
        [16, 32, 64, 128].map((size) => el("option", {}, `${size}`))));
    const length = named("max_model_len", number(2048, 1, 1e7, 1));
    const results = el("dl", { class: "calc-results" });
    const steps = el("ol", { class: "calc-steps" });
    const problem = el("p", { class: "calc-problem", role: "alert" });
    const gibs = (bytes) => `${(bytes / 2 ** 30).toFixed(2)} GiB`;

    function update() {
        const fields = [gib, utilization, other, length];
        const bad = fields.find((field) => !field.checkValidity());
        problem.textContent = bad
            ? `${bad.closest("label").firstChild.textContent}: need ${bad.min} to ${bad.max}` : "";
        if (bad) return;
        const shape = data.models[model.value];
        const perToken = 2 * shape.layers * shape.kv_heads * shape.head_dim * Number(kvBytes.value);
        const requested = Math.ceil(Number(gib.value) * 2 ** 30 * Number(utilization.value));
        const weights = shape.parameters * Number(weightBytes.value);
        const available = requested - weights - Number(other.value) * 2 ** 30;
        const result = formulas.capacity(available, perToken, Number(blockSize.value), Number(length.value));
        const shown = [
            ["per token", "bytes_per_token", perToken, `${count(perToken)} B`],
            ["per block", "bytes_per_block", result.bytes_per_block, `${count(result.bytes_per_block)} B`],
            ["blocks", "num_blocks", result.num_blocks, count(result.num_blocks)],
            ["tokens", "tokens", result.tokens, count(result.tokens)],
            ["full-length requests", "max_concurrency", result.max_concurrency, `${result.max_concurrency.toFixed(2)}x`],
        ];
        results.replaceChildren(...shown.map(([name, id, value, text]) =>
            el("div", {}, el("dt", {}, name), el("dd", { "data-result": id, "data-value": value }, text))));
        steps.replaceChildren(
            el("li", {}, `2 × ${shape.layers} layers × ${shape.kv_heads} KV heads × ${shape.head_dim} × `
                + `${kvBytes.value} B = ${count(perToken)} B per token`),
            el("li", {}, `${gib.value} GiB × ${utilization.value} = ${gibs(requested)} for the engine`),
            el("li", {}, `− ${gibs(weights)} weights (${(shape.parameters / 1e9).toFixed(2)} billion) `
                + `− ${other.value} GiB other = ${gibs(available).replace("-", "−")} `
                + (available < 0 ? "left: nothing for the cache" : "for the cache")),
            el("li", {}, `${gibs(Math.max(0, available))} ÷ ${count(result.bytes_per_block)} B per block = ${count(result.num_blocks)} blocks`),
            el("li", {}, `÷ ${Math.ceil(Number(length.value) / Number(blockSize.value))} blocks per request of `
                + `${count(Number(length.value))} tokens = ${result.max_concurrency.toFixed(2)} at once`));
    }

    const presets = el("p", { class: "calc-presets" }, "Memory of: ", Object.entries(data.gpus).map(([name, gpu]) =>
        el("button", { type: "button", onclick: () => { gib.value = gpu.gib; update(); } }, name)));
    box.append(
        el("div", { class: "widget-form" },
            labelled("Model", model), labelled("GPU memory", gib, "GiB"),
            labelled("Share for the engine", utilization), labelled("Weights", weightBytes),
            labelled("Activations and the rest", other, "GiB"), labelled("KV cache", kvBytes),
            labelled("Block size", blockSize, "tokens"), labelled("Longest request", length, "tokens")),
        presets, problem, results, steps);
    update();
    return box;
});
