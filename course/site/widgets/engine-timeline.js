/* A run of the engine, step by step. The document is that of course/site/widgets/engine_timeline.py. */
"use strict";

CourseWidgets.mount("engine-timeline", (run) => {
    const { el, sideways, stepper } = CourseWidgets;
    const words = {
        waiting: "waiting", prefill: "prefill", hit: "prefill after a prefix hit",
        recompute: "computed again", decode: "decode", starved: "running, given nothing",
        preempted: "preempted",
    };
    const box = el("section", { class: "widget-box", "aria-label": "Engine timeline" });
    const tokens = (count) => `${count} ${count === 1 ? "token" : "tokens"}`;
    const steps = run.totals.length;
    const largest = Math.max(...run.totals.map((total) => total.budget));
    const cells = run.requests.map((request) => new Map(request.cells.map((c) => [c.step, c])));
    const columns = Array.from({ length: steps }, () => []);

    const head = el("tr", {}, el("th", { scope: "col" }, "step"), run.totals.map((total, step) => {
        const cell = el("th", { scope: "col", class: "line-step", onclick: () => go(step) }, `${step}`);
        columns[step].push(cell);
        return cell;
    }));
    const rows = run.requests.map((request, i) => el("tr", { "data-request": request.id },
        el("th", { scope: "row" }, request.id),
        run.totals.map((total, step) => {
            const cell = cells[i].get(step);
            const shown = cell && cell.tokens ? `${cell.tokens}` : cell && cell.kind === "preempted" ? "×" : "";
            const node = el("td", {
                class: cell ? `line-${cell.kind}` : "line-absent",
                "data-tokens": cell ? cell.tokens : 0, "data-kind": cell ? cell.kind : "absent",
                title: cell ? `${request.id}, step ${step}: ${words[cell.kind]}, ${tokens(cell.tokens)}` : null,
                onclick: () => go(step),
            }, shown);
            columns[step].push(node);
            return node;
        })));
    const bars = el("tr", { class: "line-bars" }, el("th", { scope: "row" }, "tokens"),
        run.totals.map((total, step) => {
            const bar = el("td", { onclick: () => go(step), "data-tokens": total.scheduled },
                el("div", { style: `height:${(100 * total.scheduled) / largest}%` }));
            columns[step].push(bar);
            return bar;
        }));
    const scroll = el("div", { class: "line-scroll", tabindex: "0", role: "region",
        "aria-label": "Requests by step; scrolls sideways" },
    el("table", {}, el("thead", {}, head), el("tbody", {}, rows, bars)));

    const facts = el("dl", { class: "line-facts" });
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const detail = el("ul", { class: "line-detail" });

    function sentence(total) {
        const parts = [`${total.scheduled} of ${total.budget} tokens scheduled`];
        if (total.admitted.length) parts.push(`${total.admitted.join(", ")} admitted`);
        if (total.hits) parts.push(`${tokens(total.hits)} from the prefix cache`);
        if (total.preempted.length) parts.push(`no block was free for another: ${total.preempted.join(", ")} preempted, `
            + "the blocks given back, nobody admitted");
        if (total.finished.length) parts.push(`${total.finished.join(", ")} finished`);
        return `${parts.join("; ")}.`;
    }

    function show(step) {
        const total = run.totals[step];
        columns.forEach((column, i) =>
            column.forEach((cell) => cell.classList.toggle("line-now", i === step)));
        const now = columns[step][0];
        const left = now.offsetLeft - scroll.clientWidth / 2;
        if (scroll.scrollWidth > scroll.clientWidth) scroll.scrollLeft = left;
        said.textContent = sentence(total);
        const shown = {
            "tokens": `${total.scheduled} / ${total.budget}`, "running": total.running,
            "waiting": total.waiting, "free blocks": total.free_blocks, "hit tokens": total.hits,
        };
        facts.replaceChildren(...Object.entries(shown).map(([name, value]) =>
            el("div", {}, el("dt", {}, name), el("dd", { "data-fact": name }, `${value}`))));
        detail.replaceChildren(...run.requests.flatMap((request, i) => {
            const cell = cells[i].get(step);
            if (!cell) return [];
            const blocks = cell.blocks.length ? `, blocks [${cell.blocks.join(", ")}]` : "";
            const after = cell.computed + cell.tokens;
            const text = cell.tokens
                ? `${words[cell.kind]}, ${tokens(cell.tokens)}, computed ${cell.computed} → ${after} of ${cell.known}`
                : words[cell.kind];
            return [el("li", {}, el("b", {}, request.id), ` ${text}${blocks}`,
                cell.sampled ? ", samples a token" : "", cell.finish ? `, ends: ${cell.finish}` : "")];
        }));
    }

    const legend = el("p", { class: "widget-legend" }, Object.entries(words).map(([kind, text]) =>
        el("span", {}, el("i", { class: `line-${kind}`, "aria-hidden": "true" }), text)));
    const [controls, go] = stepper(box, steps, "step", show, 0);
    box.append(el("p", { class: "widget-title" }, run.title), controls, said, facts, scroll, sideways(scroll), legend,
        el("details", {}, el("summary", {}, "Every request in this step"), detail));
    go(0);
    return box;
});
