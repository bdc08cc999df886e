/* What a reader of the live engine turns: the settings and the requests. Nothing global but `CourseLiveForm`. */
"use strict";

const CourseLiveForm = (() => {
    const { el, labelled } = CourseWidgets;
    const SLIDERS = [
        ["budget", "Token budget of a step"], ["blocks", "Blocks in the pool"], ["slots", "Slots: requests at once"],
    ];
    const SIZES = [4, 8, 16, 32];

    /** Sliders and, folded, the other settings; `changed(settings)` while one is moved. */
    function settings(run, changed) {
        const { bounds } = run;
        const now = { ...run.settings };
        const set = (name, value) => {
            now[name] = value;
            changed({ ...now });
        };
        const slider = (name, text, [least, most]) => {
            const shown = el("output", {}, `${now[name]}`);
            const range = el("input", {
                type: "range", min: least, max: most, value: now[name], "data-setting": name,
                oninput: () => {
                    shown.textContent = range.value;
                    set(name, Number(range.value));
                },
            });
            return labelled([text, " ", shown], range);
        };
        const check = (name, text) => {
            const box = el("input", { type: "checkbox", "data-setting": name, onchange: () => set(name, Number(box.checked)) });
            box.checked = Boolean(now[name]);
            return el("label", { class: "live-check" }, box, ` ${text}`);
        };
        const select = (name, values, read) => {
            const field = el("select", { "data-setting": name, onchange: () => set(name, read(field.value)) },
                values.map((value) => el("option", { value, selected: value === now[name] ? "" : null }, `${value}`)));
            return field;
        };
        const sizes = [...new Set([...SIZES, now.block_size])].sort((a, b) => a - b);
        return [
            el("div", { class: "widget-form live-sliders" }, SLIDERS.map(([name, text]) =>
                slider(name, text, name === "slots" ? bounds.slots : [bounds[name][0], Math.max(64, now[name])]))),
            el("details", { class: "live-more" }, el("summary", {}, "More settings"),
                el("div", { class: "widget-form" },
                    labelled("Tokens in a block", select("block_size", sizes, Number)),
                    slider("threshold", "Most tokens of one request, 0 is no bound", [0, Math.max(64, now.threshold)]),
                    labelled("Order", select("policy", ["fcfs", "priority"], String)),
                    el("div", {}, check("chunked", "Chunked prefill"), check("caching", "Prefix caching")))),
        ];
    }

    /** The requests as a list to edit; `changed(requests)` when a field is left. */
    function requests(run, most, place, changed) {
        const now = run.requests.map(({ prompt, max_tokens, arrival, priority }) => ({ prompt, max_tokens, arrival, priority }));
        const set = (i, name, value) => { // kept: the next field is changed before these are drawn anew
            now[i] = { ...now[i], [name]: value };
            changed([...now]);
        };
        const urgent = run.settings.policy === "priority";
        const small = (i, name, text, least, bound) => {
            const field = el("input", {
                type: "number", min: least, max: bound, value: now[i][name], "data-field": name,
                "aria-label": `${text} of ${run.requests[i].id}`,
                onchange: () => set(i, name, field.value === "" ? least : Math.round(Number(field.value))),
            });
            return el("label", {}, el("span", {}, text), field);
        };
        const rows = run.requests.map(({ id }, i) => {
            const text = el("input", {
                type: "text", value: now[i].prompt, maxlength: most.bytes, "aria-label": `Prompt of ${id}`,
                "data-field": "prompt", onchange: () => set(i, "prompt", text.value),
            });
            return el("li", { "data-id": id }, el("b", {}, id), text, el("div", {},
                small(i, "max_tokens", "outputs", 1, most.outputs), small(i, "arrival", "from step", 0, 400),
                urgent ? small(i, "priority", "priority", -9, 9) : null,
                now.length > 1 ? el("button", {
                    type: "button", "aria-label": `Remove ${id}`, title: `Remove ${id}`,
                    onclick: () => changed(now.filter((_, j) => j !== i)),
                }, "×") : null));
        });
        const fresh = el("input", {
            type: "text", maxlength: most.bytes, "aria-label": "Prompt of a new request",
            placeholder: "Type a prompt", "data-field": "new",
        });
        const add = () => {
            if (fresh.value) changed([...now, { prompt: fresh.value, max_tokens: 16, arrival: place, priority: 0 }]);
            else fresh.focus();
        };
        fresh.addEventListener("keydown", (event) => event.key === "Enter" && add());
        return [
            el("ul", { class: "live-requests" }, rows),
            now.length < most.requests ? el("p", { class: "live-add" }, fresh,
                el("button", { type: "button", onclick: add }, `Add, from step ${place}`))
                : el("p", { class: "film-none" }, `No more than ${most.requests} requests.`),
        ];
    }

    /** A question about the step that comes next, from its frame: {ask, choices, answer, because} or null. */
    function question(before, next) {
        if (!next.total) return null;
        const because = (about, names) => (next.why.find((each) => each.about === about
            && (!names || names.includes(each.name))) || { text: "" }).text;
        const { preempted, admitted } = next.total;
        if (preempted.length && before.running.length > 1) {
            const victim = preempted[0];
            return { ask: "The next step runs out of blocks. Who has to give its blocks back?",
                choices: before.running, answer: victim,
                because: because(victim, ["gives_way_as_the_last", "gives_way_as_least_urgent"]) };
        }
        const head = before.waiting[0];
        if (head && before.total && next.waiting.includes(head) !== before.waiting.includes(head)) {
            return { ask: `${head} waits. Will the next step admit it?`, choices: ["yes", "no"], answer: "yes",
                because: because(head, ["is_admitted"]) };
        }
        if (head && next.waiting.includes(head) && before.total && before.running.length !== next.running.length) {
            return { ask: `${head} waits. Will the next step admit it?`, choices: ["yes", "no"], answer: "no",
                because: next.why.find((each) => each.about === head)?.text || "" };
        }
        const large = next.batch.filter((entry) => entry.tokens > 1);
        const one = large.find((entry) => entry.tokens < entry.known - entry.computed) || large[0];
        if (one && (!admitted.length || next.batch.length > 1)) {
            const { id, tokens, known, computed } = one;
            const { budget } = next.total;
            const others = [known - computed, budget, tokens + next.batch.length, 1, tokens + 8];
            const choices = [...new Set([tokens, ...others])].filter((n) => n > 0).slice(0, 4).sort((a, b) => a - b);
            return { ask: `${id} has ${known - computed} of its ${known} tokens to compute, and the next step has ${budget} for `
                + "everybody. How many does it get?", choices: choices.map(String),
                answer: `${tokens}`,
                because: because(id, ["catches_up", "is_held_to_the_threshold", "takes_the_rest"]) };
        }
        return null;
    }

    return { settings, requests, question };
})();
