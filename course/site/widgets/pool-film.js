/* The block pool, one operation at a time. The document is that of course/site/widgets/pool_film.py. */
"use strict";

CourseWidgets.mount("pool-film", (film) => {
    const { el, stepper } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "Block pool, step by step" });
    const call = el("code", { class: "film-call" });
    const say = el("p", { class: "film-say", "aria-live": "polite" });
    const pool = el("ol", { class: "film-pool", "aria-label": "Physical blocks" });
    const queue = el("ol", { class: "film-queue", "aria-label": "Free queue, next out first" });
    const index = el("ul", { class: "film-index", "aria-label": "Hash index" });
    const tables = el("ul", { class: "film-tables", "aria-label": "Block tables" });

    function state(block) {
        if (block.is_null) return "null";
        if (block.ref_cnt > 1) return "shared";
        if (block.ref_cnt === 1) return "used";
        return block.hash ? "cached" : "free";
    }
    const words = {
        null: "null block", shared: "shared", used: "in use", cached: "free, still cached", free: "free", changed: "changed by this call",
    };

    function card(block, frame) {
        const changed = frame.changed.includes(block.id);
        const hit = frame.hits.includes(block.id);
        return el("li", {
            class: `film-block film-${state(block)}${changed ? " film-changed" : ""}`,
            "data-id": block.id, "data-ref": block.ref_cnt, "data-hash": block.hash,
        },
        el("span", { class: "film-id" }, `${block.id}`),
        el("code", { class: "film-tokens" }, block.is_null ? "null" : block.tokens || "\u00a0"),
        el("span", { class: "film-facts" },
            block.is_null ? "" : `ref ${block.ref_cnt}`, block.hash ? ` · ${block.hash}` : "",
            hit ? " · hit" : ""),
        el("span", { class: "sr" }, `, ${words[state(block)]}${changed ? ", changed" : ""}`));
    }

    function show(place) {
        const frame = film.frames[place];
        call.textContent = frame.returns === undefined || frame.returns === null || frame.returns === ""
            ? frame.call : `${frame.call} → ${frame.returns}`;
        say.textContent = frame.say;
        pool.replaceChildren(...frame.blocks.map((block) => card(block, frame)));
        queue.replaceChildren(...(frame.free_queue.length
            ? frame.free_queue.map((id) => {
                const cached = frame.blocks[id].hash;
                return el("li", { class: cached ? "film-cached" : "film-free", "data-id": id }, `${id}`);
            })
            : [el("li", { class: "film-none" }, "empty")]));
        const keys = Object.entries(frame.index);
        index.replaceChildren(...(keys.length
            ? keys.map(([hash, ids]) => el("li", { "data-hash": hash }, `${hash} → ${ids.join(", ")}`))
            : [el("li", { class: "film-none" }, "empty")]));
        const rows = Object.entries(frame.tables);
        tables.replaceChildren(...(rows.length
            ? rows.map(([name, ids]) => el("li", { "data-request": name }, `${name}: [${ids.join(", ")}]`))
            : [el("li", { class: "film-none" }, "none")]));
    }

    const legend = el("p", { class: "widget-legend" }, ["used", "shared", "cached", "free", "changed"].map((name) =>
        el("span", {}, el("i", { class: `film-block film-${name}`, "aria-hidden": "true" }), words[name])));
    const [controls, go] = stepper(box, film.frames.length, "frame", show);
    box.append(controls, el("p", { class: "film-head" }, call), say, pool, legend,
        el("div", { class: "film-books" },
            el("div", {}, el("h4", {}, "Free queue, next out first"), queue),
            el("div", {}, el("h4", {}, "Hash index"), index),
            el("div", {}, el("h4", {}, "Block tables"), tables)));
    go(0);
    return box;
});
