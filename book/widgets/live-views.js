/* What the live engine shows of one step: the timeline so far, the batch, the queues, the block pool, the texts, and
 * why. Every view is a function of the run's document (course/site/live.py) and a place in it. Nothing global but
 * `CourseLiveViews`.
 */
"use strict";

const CourseLiveViews = (() => {
    const { el } = CourseWidgets;
    const WORDS = {
        waiting: "waiting", prefill: "prefill", hit: "prefill after a prefix hit", recompute: "computed again",
        decode: "decode", starved: "running, given nothing", preempted: "preempted",
    };
    const LEAST_COLUMNS = 16;
    const number = (count, noun) => `${count} ${count === 1 ? noun : `${noun}s`}`;
    const color = (id) => `live-r${(id.charCodeAt(0) - 65) % 8}`;
    const chip = (id, ...more) => el("span", { class: `live-chip ${color(id)}` }, id, ...more);

    // ------------------------------------------------------------ the timeline

    /** The table of requests by steps, those after `place` faint; `go(place)` when a step is clicked. */
    function timeline(run, place, go) {
        const columns = Math.max(LEAST_COLUMNS, run.frames.length - 1);
        const steps = Array.from({ length: columns }, (_, step) => step);
        const known = (step) => step < run.frames.length - 1;
        const mark = (step) => (step === place - 1 ? " line-now" : step >= place ? " live-ahead" : "");
        const head = el("tr", {}, el("th", { scope: "col" }, "step"), steps.map((step) =>
            el("th", { scope: "col", class: `line-step${mark(step)}`, onclick: () => known(step) && go(step + 1) }, `${step}`)));
        const rows = run.requests.map(({ id }) => el("tr", { "data-request": id },
            el("th", { scope: "row" }, chip(id)),
            steps.map((step) => {
                const cell = known(step) ? run.frames[step + 1].cells[id] : null;
                if (!cell) return el("td", { class: `line-absent${mark(step)}`, "data-kind": "absent" });
                const shown = cell.tokens ? `${cell.tokens}` : cell.kind === "preempted" ? "×" : "";
                return el("td", {
                    class: `line-${cell.kind}${mark(step)}${cell.finish ? " live-end" : ""}`, "data-kind": cell.kind,
                    "data-tokens": cell.tokens, onclick: () => go(step + 1),
                    title: `${id}, step ${step}: ${WORDS[cell.kind]}, ${number(cell.tokens, "token")}`
                        + `${cell.finish ? ", the last step" : ""}`,
                }, shown);
            })));
        return [el("thead", {}, head), el("tbody", {}, rows)];
    }

    const legend = () => el("p", { class: "widget-legend" }, Object.entries(WORDS).map(([kind, text]) =>
        el("span", {}, el("i", { class: `line-${kind}`, "aria-hidden": "true" }), text)));

    // ------------------------------------------------------------ one step in words and numbers

    function sentence(run, frame) {
        if (!frame.total) {
            const waiting = [frame.waiting.slice(0, -1).join(", "), frame.waiting.at(-1)].filter(Boolean).join(" and ") || "nobody";
            return `Before step 0: ${waiting} ${frame.waiting.length > 1 ? "wait" : "waits"}, every block is free. `
                + "Press Step.";
        }
        const { total, texts } = frame;
        const parts = [`${total.scheduled} of ${total.budget} tokens`];
        if (total.admitted.length) parts.push(`${total.admitted.join(", ")} admitted`);
        if (total.hits) parts.push(`${number(total.hits, "token")} from the cache`);
        if (total.preempted.length) parts.push(`${total.preempted.join(", ")} preempted`);
        if (total.finished.length) parts.push(`${total.finished.join(", ")} finished`);
        if (!run.requests.some(({ id }) => id in texts)) parts.push("nobody is there");
        return `Step ${frame.step}: ${parts.join("; ")}.`;
    }

    /** The step's budget as a bar: who gets how many tokens of it. */
    function batch(run, frame) {
        const budget = run.settings.budget;
        const taken = frame.batch.reduce((sum, entry) => sum + entry.tokens, 0);
        const part = (tokens, name, text, title) => el("li", {
            class: name, style: `flex-grow:${tokens}`, "data-tokens": tokens, title,
        }, text);
        return el("ol", { class: "live-batch", "aria-label": `Batch of this step, ${taken} of ${budget} tokens` },
            frame.batch.map(({ id, tokens, kind }) => part(tokens, color(id), [el("b", {}, id), ` ${tokens}`],
                `${id}: ${number(tokens, "token")}, ${WORDS[kind]}`)),
            taken < budget ? part(budget - taken, "live-unused", `${budget - taken} unused`, "unused") : null);
    }

    /** Running and waiting requests in their order; `end(id)` ends one. */
    function queues(run, frame, place, end) {
        const waits = new Map(frame.why.filter((each) => each.name.startsWith("waits"))
            .map((each) => [each.about, each.text]));
        const got = new Map(frame.batch.map((entry) => [entry.id, entry]));
        const button = (id) => el("button", {
            type: "button", class: "live-abort", title: `End ${id} now`, "aria-label": `End ${id} now`,
            onclick: () => end(id),
        }, "×");
        const ends = (id) => run.aborts.some(([at, who]) => at === place && who === id);
        const runs = (id) => {
            if (ends(id)) return "is ended before the next step";
            const entry = got.get(id);
            if (!entry) return "gets nothing";
            const hit = entry.hit ? `, ${entry.hit} from the cache` : "";
            return `${number(entry.tokens, "token")}, ${WORDS[entry.kind].split(" ")[0]}${hit}`;
        };
        const list = (title, ids, text) => el("div", { class: "live-queue" }, el("h4", {}, title),
            ids.length ? el("ol", {}, ids.map((id) => el("li", { "data-id": id }, chip(id),
                el("span", {}, text(id)), button(id)))) : el("p", { class: "film-none" }, "nobody"));
        const waiting = (id) => ends(id) ? "is ended before the next step" : (waits.get(id) || `${id} waits`).replace(/^\w waits:? ?/, "");
        return [
            list(`Running, ${frame.running.length} of ${number(run.settings.slots, "slot")}`, frame.running, runs),
            list(`Waiting, ${frame.waiting.length}`, frame.waiting, frame.total ? waiting : () => "has just come"),
        ];
    }

    // ------------------------------------------------------------ the block pool

    /** Every block with who holds it, and the queue of the free ones. */
    function pool(run, frame) {
        const { refs, hashes, free, tables, hits, fresh, lost } = frame.pool;
        const owners = refs.map(() => []);
        for (const [id, table] of Object.entries(tables)) for (const block of table) owners[block].push(id);
        const cells = refs.map((ref, block) => {
            if (block === 0) return null;
            const state = ref > 1 ? "shared" : ref ? "used" : hashes[block] ? "cached" : "free";
            const marks = [hits.includes(block) && "hit", fresh.includes(block) && "new",
                lost.includes(block) && "overwritten"].filter(Boolean);
            const owner = owners[block].join(" and ");
            const says = { shared: `shared by ${owner}`, used: `held by ${owner}`,
                cached: "free, its content still cached", free: "free" }[state];
            return el("li", {
                class: `live-block live-${state} ${ref ? color(owners[block][0]) : ""} `
                    + marks.map((name) => `live-is-${name}`).join(" "),
                "data-id": block, "data-ref": ref, "data-owners": owners[block].join(""), "data-state": state,
                title: `Block ${block}: ${[says, ...marks].join(", ")}${hashes[block] ? `, prefix ${hashes[block]}` : ""}`,
            }, el("small", {}, `${block}`), el("b", {}, owners[block].join("") || (state === "cached" ? "·" : "\u00a0")),
            el("span", { class: "sr" }, `, ${[says, ...marks].join(", ")}`));
        });
        const first = free.slice(0, 24);
        const queue = first.length ? `${first.join(" ")}${free.length > 24 ? " ..." : ""}` : "empty";
        return [
            el("h4", {}, `Block pool, ${free.length} of ${refs.length - 1} free`),
            el("ol", { class: "live-pool" }, cells),
            el("p", { class: "live-keys" },
                el("span", {}, el("i", { class: "live-block live-used live-r0" }), "held"),
                el("span", {}, el("i", { class: "live-block live-shared live-r0" }), "shared"),
                el("span", {}, el("i", { class: "live-block live-cached" }, "·"), "free, still cached"),
                el("span", {}, el("i", { class: "live-block live-free" }), "free"),
                el("span", {}, el("i", { class: "live-block live-free live-is-hit" }), "hit in this step"),
                el("span", {}, el("i", { class: "live-block live-free live-is-new" }), "new in this step")),
            el("p", { class: "live-free-queue" }, "Free queue, next out first: ", el("code", {}, queue)),
        ];
    }

    // ------------------------------------------------------------ texts, counters

    function texts(run, frame, place) {
        const over = (id) => run.frames.slice(0, place + 1).some(({ cells }) => cells[id]?.finish);
        const inLine = (text) => text.replace(/\n+/g, "↵");
        return el("ul", { class: "live-texts" }, run.requests.map(({ id, prompt, max_tokens: most, prompt_tokens: size }) => {
            const text = frame.texts[id];
            const kept = text === undefined ? "comes later" : `${size} in, ${most} out`;
            return el("li", { "data-id": id, class: text === undefined ? "live-later" : null }, chip(id),
                el("p", {}, el("span", { class: "live-prompt" }, prompt), text ? el("mark", {}, inLine(text)) : null),
                el("small", {}, over(id) ? "finished" : kept));
        }));
    }

    const COUNTED = { steps: "steps", computed: "tokens computed", hits: "tokens from the cache",
        again: "computed again", preemptions: "preemptions" };

    /** The sums so far and, beside them, those of the run before the last change, if both came to their end. */
    function counters(frame, before) {
        return Object.entries(COUNTED).map(([name, words]) => el("div", {}, el("dt", {}, words),
            el("dd", { "data-fact": name }, `${frame.counters[name]}`,
                before ? el("small", {}, ` was ${before[name]}`) : null)));
    }

    // ------------------------------------------------------------ why

    /** The decisions of a step; those that say the same of several requests are one. */
    function grouped(why) {
        const same = new Map();
        for (const each of why) {
            const rest = each.text.startsWith(`${each.about} `) ? each.text.slice(each.about.length) : each.text;
            const key = /^(waits|decodes|is_not_reached)/.test(each.name) ? `${each.name}${rest}` : each.text;
            if (!same.has(key)) same.set(key, { ...each, rest, ids: [] });
            same.get(key).ids.push(each.about);
        }
        return [...same.values()].map(({ ids, rest, ...each }) => {
            if (ids.length === 1) return each;
            const who = `${ids.slice(0, -1).join(", ")} and ${ids.at(-1)}`;
            const what = rest.replace(/^ waits/, " wait").replace(/^ gets nothing/, " get nothing")
                .replace(/^ computes 1 token:/, " compute 1 token each:");
            return { ...each, about: ids.join(" "), text: who + what };
        });
    }

    /** Every decision as a fold: what it says, the rule, and its lines in vLLM and here. */
    function why(frame, source) {
        if (!frame.total) return el("p", { class: "film-none" }, "Nothing is decided yet.");
        return el("ul", { class: "live-why" }, grouped(frame.why).map((each) => {
            const { path, first, last, symbol } = each.vllm;
            const lines = first === last ? `L${first}` : `L${first}-L${last}`;
            const at = first === last ? `${first}` : `${first}-${last}`;
            return el("li", { "data-rule": each.name, "data-about": each.about },
                el("details", {}, el("summary", {}, el("span", {}, each.text), el("i", {}, "why?")),
                    el("p", {}, each.rule),
                    el("p", { class: "live-source" }, "vLLM: ",
                        el("a", { href: `${source}/${path}#${lines}` }, el("code", {}, `${path}:${at}`)), " ",
                        el("code", {}, symbol)),
                    el("p", { class: "live-source" }, "mini_vllm: ", el("code", {}, `${each.mini.path}:${each.mini.line}`),
                        " ", el("code", {}, each.mini.symbol), el("br"), el("code", { class: "live-code" }, each.mini.code))));
        }));
    }

    return { timeline, legend, sentence, batch, queues, pool, texts, counters, why, number };
})();
