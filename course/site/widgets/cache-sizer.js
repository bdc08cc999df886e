/* What a config.json makes of a memory. The document is that of course/site/widgets/cache_sizer.py, whose `sized` the page calls:
 * nothing is computed here. */
"use strict";

CourseWidgets.mount("cache-sizer", (data) => {
    const { el, labelled, choice, inPage } = CourseWidgets;
    const engine = inPage("course.site.widgets.cache_sizer", data.bytes);
    const box = el("section", { class: "widget-box", "aria-label": "From a config.json to the size of a cache" });
    const named = (id, field) => { field.dataset.input = id; return field; };
    const number = (id, max, step = 1) => named(id, el("input", { type: "number", min: step === 1 ? 1 : 0.001, max, step, required: "",
        oninput: () => stale() }));
    const bytes = (id, texts) => named(id, el("select", { onchange: () => stale() },
        texts.map(([value, text]) => el("option", { value }, text))));
    const fields = {
        memory_gib: number("memory_gib", 65536, "any"), max_model_len: number("max_model_len", 2147483647),
        block_size: number("block_size", 1048576), max_num_batched_tokens: number("max_num_batched_tokens", 2147483647),
        dtype_bytes: bytes("dtype_bytes", [[2, "16 bits"], [1, "8 bits"], [4, "32 bits"]]),
        state_dtype_bytes: bytes("state_dtype_bytes", [[2, "16 bits"], [4, "32 bits"]]),
    };
    const WORDS = { memory_gib: ["Memory for the cache", "GiB"], max_model_len: ["max_model_len", "tokens"], block_size: ["block_size", "tokens"],
        max_num_batched_tokens: ["max_num_batched_tokens", "tokens"], dtype_bytes: ["K and V"], state_dtype_bytes: ["States"] };
    const caching = named("enable_prefix_caching", el("input", { type: "checkbox", checked: "", onchange: () => stale() }));
    const model = named("model", choice(Object.keys(data.models), null, () => preset()));
    const source = el("p", { class: "widget-legend" });
    const config = named("config", el("textarea", { rows: 8, maxlength: data.most, spellcheck: "false", "aria-label": "config.json", oninput: () => stale() }));
    const run = engine ? el("button", { type: "button", onclick: () => size() }, "") : null;
    const trouble = el("p", { class: "run-trouble", role: "alert" });
    const rows = el("tbody", {});
    const table = el("table", {}, el("thead", {}, el("tr", {}, ["layers", "keep", "tokens a block", "blocks a request"].map((text) => el("th", {}, text)))), rows);
    const steps = el("ol", { class: "calc-steps" });
    const log = el("pre", { "aria-live": "polite" });
    source.style.overflowWrap = "anywhere";
    log.style.whiteSpace = "pre-wrap";
    let asked = 0; // an answer that was asked for before the last change is not shown

    function show(sized) {
        const same = (a, b) => b && ["keeps", "layers", "block_size", "most_blocks"].every((name) => a[name] === b[name]);
        const kinds = [];
        for (const group of sized.groups) {
            if (same(group, kinds.at(-1)?.group)) kinds.at(-1).times += 1;
            else kinds.push({ group, times: 1 });
        }
        rows.replaceChildren(...kinds.map(({ group, times }) => el("tr", {}, [`${times} × ${group.layers}`, group.keeps,
            group.block_size.toLocaleString("en"), group.most_blocks.toLocaleString("en")].map((text) => el("td", {}, text)))));
        steps.replaceChildren(...sized.steps.map((step) => el("li", {}, step)));
        log.textContent = sized.lines.join("\n");
        table.hidden = steps.hidden = log.hidden = false;
        box.dataset.blocks = sized.num_blocks;
    }

    function stale() {
        asked += 1;
        trouble.textContent = "";
        table.hidden = steps.hidden = log.hidden = true;
        delete box.dataset.blocks;
    }

    function preset() {
        const chosen = data.models[model.value];
        stale();
        config.value = chosen.config;
        source.textContent = `From ${chosen.source.replaceAll("`", "")}.`;
        caching.checked = true;
        for (const [name, field] of Object.entries(fields)) field.value = chosen.knobs[name];
        show(chosen.sized);
    }

    async function size() {
        const bad = Object.entries(fields).find(([, field]) => !field.checkValidity());
        stale();
        if (bad) {
            trouble.textContent = `${WORDS[bad[0]][0]}: need ${bad[1].min} to ${bad[1].max}`;
            return;
        }
        const mine = asked, given = { config: config.value, enable_prefix_caching: caching.checked };
        for (const [name, field] of Object.entries(fields)) given[name] = Number(field.value);
        run.disabled = true;
        try {
            const sized = await engine.call("sized", given);
            if (mine === asked) show(sized);
        } catch (error) {
            if (mine === asked) trouble.textContent = error.message;
        }
        run.disabled = false;
        run.textContent = engine.offer("Size it");
    }

    config.addEventListener("dragover", (event) => event.preventDefault());
    config.addEventListener("drop", async (event) => {
        const [file] = event.dataTransfer.files;
        if (!file) return;
        event.preventDefault();
        stale();
        if (file.size > data.most) trouble.textContent = `${file.name}: ${file.size} bytes; need at most ${data.most}`;
        else config.value = await file.text();
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    if (engine) run.textContent = engine.offer("Size it");
    box.append(
        el("p", { class: "widget-title" }, engine ? "A model's config.json: choose one, paste or drop yours" : "A model's config.json"),
        el("div", { class: "widget-form" }, labelled("Model", model)), config, source,
        el("div", { class: "widget-form" }, Object.entries(fields).map(([name, field]) => labelled(WORDS[name][0], field, WORDS[name][1])),
            labelled("Prefix caching", caching)),
        ...(engine ? [el("p", { class: "calc-presets" }, run), engine.box] : []), trouble, table, steps, log);
    preset();
    return box;
});
