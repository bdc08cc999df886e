/* A row of real logits under every knob of the sampler, in vLLM's order and in wrong ones. The document is
 * that of course/site/widgets/sampling_knobs.py. */
"use strict";

(() => {
    const softmax = (logits) => {
        const most = Math.max(...logits);
        const weights = logits.map((z) => Math.exp(z - most));
        const sum = weights.reduce((a, b) => a + b, 0);
        return weights.map((w) => w / sum);
    };
    const keep = (logits, kept) => logits.map((z, i) => (kept(z, i) ? z : -Infinity));

    /** The stages of mini_vllm/sample/processors.py and mini_vllm/sampler.py, one row [257] in, one out. */
    const STAGES = {
        ban: (z, knobs) => keep(z, (_, i) => i !== knobs.ban),
        bias: (z, knobs) => z.map((v, i) => (i === knobs.bias_token ? v + knobs.bias : v)),
        penalties: (z, knobs, row) => {
            const counts = new Array(z.length).fill(0);
            for (const token of row.output) counts[token] += 1;
            const seen = new Set([...row.prompt, ...row.output]);
            return z.map((v, i) => {
                const once = seen.has(i) && knobs.repetition !== 1
                    ? v * (v > 0 ? 1 / knobs.repetition : knobs.repetition) : v;
                return once - (knobs.frequency * counts[i] + knobs.presence * (counts[i] > 0 ? 1 : 0));
            });
        },
        temperature: (z, knobs) => (knobs.temperature > 0 ? z.map((v) => v / knobs.temperature) : z),
        min_p: (z, knobs) => {
            if (knobs.temperature === 0 || knobs.min_p <= 0) return z;
            const law = softmax(z);
            const bound = knobs.min_p * Math.max(...law);
            return keep(z, (_, i) => law[i] >= bound);
        },
        top_k: (z, knobs) => {
            if (knobs.temperature === 0 || knobs.top_k <= 0 || knobs.top_k >= z.length) return z;
            const bound = [...z].sort((a, b) => b - a)[knobs.top_k - 1];
            return keep(z, (v) => v >= bound);
        },
        top_p: (z, knobs) => {
            if (knobs.temperature === 0 || knobs.top_p >= 1) return z;
            const law = softmax(z);
            const order = z.map((_, i) => i).sort((a, b) => z[b] - z[a] || a - b);
            const kept = new Set();
            let before = 0;
            for (const i of order) {
                if (before < knobs.top_p) kept.add(i);
                before += law[i];
            }
            return keep(z, (_, i) => kept.has(i));
        },
    };

    /** The same as `stages` there: tokens left after each stage of `order`, and the law of the next token. */
    CourseWidgets.formulas.samplingStages = (row, knobs, order) => {
        let z = row.logits;
        const left = [];
        const some = () => z.some((v) => v > -Infinity);
        for (const name of order) {
            if (some()) z = STAGES[name](z, knobs, row);
            left.push(z.filter((v) => v > -Infinity).length);
        }
        if (!some()) return { left, law: z.map(() => 0) };
        if (knobs.temperature > 0) return { left, law: softmax(z) };
        const best = z.indexOf(Math.max(...z));
        return { left, law: z.map((_, i) => (i === best ? 1 : 0)) };
    };
})();

CourseWidgets.mount("sampling-knobs", (data) => {
    const { el, svg, labelled, choice, questions, formulas } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "One row of logits under every knob" });
    const said = {};
    const WORDS = {
        ban: "ban", bias: "bias", penalties: "penalties", temperature: "temperature",
        min_p: "min-p", top_k: "top-k", top_p: "top-p",
    };
    const visible = (id) => ({ 9: "⇥", 10: "↵", 32: "␣", 256: "EOS" })[id]
        ?? (id < 127 && id > 32 ? String.fromCharCode(id) : `0x${id.toString(16)}`);
    const named = (id, field) => { field.dataset.input = id; return field; };
    const range = (id, min, max, step) => {
        said[id] = el("output");
        return named(id, el("input", { type: "range", min, max, step, value: data.off[id], oninput: update }));
    };
    const row = named("row", choice(Object.keys(data.rows), "open", refill));
    const order = named("order", choice(Object.keys(data.orders), null, update));
    const sliders = {
        temperature: range("temperature", 0, 2, 0.1), top_k: range("top_k", 0, 30, 1),
        top_p: range("top_p", 0.05, 1, 0.05), min_p: range("min_p", 0, 0.5, 0.01),
        repetition: range("repetition", 0.5, 2, 0.05), presence: range("presence", -2, 2, 0.1),
        frequency: range("frequency", -2, 2, 0.1), bias: range("bias", -10, 10, 0.5),
    };
    const ban = named("ban", el("select", { onchange: update }));
    const biasToken = named("bias_token", el("select", { onchange: update }));
    const context = el("p", { class: "spec-text knob-context" });
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const chain = el("ol", { class: "knob-stages", "aria-label": "Tokens left after each stage" });
    const plot = svg("svg", { role: "img", class: "roof-plot knob-plot" });
    const SHOWN = 14;

    const likeliest = (law) => law.map((_, i) => i).sort((a, b) => law[b] - law[a] || a - b);
    const plain = () => formulas.samplingStages(data.rows[row.value], data.off, data.orders["vLLM's"]).law;

    function tokens(field, none) {
        const before = field.value;
        const ids = likeliest(plain()).slice(0, 20);
        field.replaceChildren(el("option", { value: "" }, none),
            ...ids.map((id) => el("option", { value: id }, visible(id))));
        if (before !== "" && !ids.includes(Number(before))) {
            field.append(el("option", { value: before }, visible(Number(before))));
        }
        field.value = before;
    }

    function refill() {
        tokens(ban, "none");
        tokens(biasToken, "none");
        update();
    }

    function knobs() {
        const found = Object.fromEntries(Object.entries(sliders).map(([id, field]) => [id, Number(field.value)]));
        found.ban = ban.value === "" ? null : Number(ban.value);
        found.bias_token = biasToken.value === "" ? null : Number(biasToken.value);
        return found;
    }

    function set(values) {
        for (const [id, field] of Object.entries(sliders)) field.value = values[id];
        for (const [field, id] of [[ban, values.ban], [biasToken, values.bias_token]]) {
            if (id !== null && ![...field.options].some((option) => option.value === String(id))) {
                field.append(el("option", { value: id }, visible(id)));
            }
            field.value = id ?? "";
        }
    }

    function draw(before, law) {
        const ids = [...new Set([...likeliest(before).slice(0, SHOWN - 2), ...likeliest(law).slice(0, 2)])];
        ids.sort((a, b) => before[b] - before[a] || a - b);
        const rest = (of) => 1 - ids.reduce((sum, id) => sum + of[id], 0);
        const none = law.every((p) => p === 0);
        const bars = ids.map((id) => [visible(id), before[id], law[id]]);
        bars.push(["others", rest(before), none ? 0 : Math.max(0, rest(law))]);
        const W = 440, LINE = 20, L = 66, R = 60;
        const wide = (share) => (W - L - R) * share;
        plot.setAttribute("viewBox", `0 0 ${W} ${bars.length * LINE + 4}`);
        plot.replaceChildren(
            svg("title", {}, "Probabilities before, as outlines, and after, filled"),
            ...bars.flatMap(([name, from, to], i) => [
                svg("text", { x: L - 8, y: i * LINE + 15, "text-anchor": "end" }, name),
                svg("rect", { x: L, y: i * LINE + 3, width: wide(to), height: LINE - 6, class: "knob-after" }),
                svg("rect", { x: L, y: i * LINE + 3, width: wide(from), height: LINE - 6, class: "knob-before" }),
                svg("text", { x: L + wide(Math.max(from, to)) + 6, y: i * LINE + 15 },
                    to === 0 ? "-" : to.toFixed(3)),
            ]));
    }

    function update() {
        const values = knobs();
        const chosen = data.rows[row.value];
        const { left, law } = formulas.samplingStages(chosen, values, data.orders[order.value]);
        const off = {
            temperature: values.temperature === 0 ? "0, greedy" : null, top_k: values.top_k === 0 ? "off" : null,
            top_p: values.top_p === 1 ? "off" : null, min_p: values.min_p === 0 ? "off" : null,
            repetition: values.repetition === 1 ? "off" : null,
        };
        for (const [id, field] of Object.entries(sliders)) {
            said[id].textContent = off[id] ?? String(Number(field.value));
            field.setAttribute("aria-valuetext", said[id].textContent);
        }
        sliders.bias.disabled = biasToken.value === "";
        const text = (ids) => ids.map((id) => String.fromCharCode(id)).join("");
        context.replaceChildren(text(chosen.prompt), el("span", { class: "spec-kept" }, text(chosen.output)), "▏");
        draw(plain(), law);
        const stages = data.orders[order.value];
        chain.replaceChildren(...stages.map((name, i) =>
            el("li", { class: left[i] === (i ? left[i - 1] : law.length) ? "" : "knob-cut" },
                `${WORDS[name]} ${left[i]}`)));
        const best = likeliest(law)[0];
        const count = left[left.length - 1];
        verdict.textContent = count === 0
            ? "No token is left. Here the request ends with an error; vLLM's sampler on a processor says token 0."
            : values.temperature === 0
                ? `Greedy: ${visible(best)}, the largest logit after the edits. No filter runs and nothing is drawn.`
                : `${count} of ${law.length} tokens left; ${visible(best)} is the likeliest, ${law[best].toFixed(3)}.`;
        verdict.dataset.left = JSON.stringify(left);
        verdict.dataset.law = JSON.stringify(law);
    }

    const posed = questions(data.questions, "Set the knobs and count", (question) => {
        row.value = question.row;
        order.value = question.order;
        refill();
        set(question.knobs);
        update();
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    const reset = el("button", { type: "button", onclick: () => { set(data.off); update(); } }, "All knobs off");
    box.append(
        ...posed,
        el("div", { class: "widget-form knob-form" }, labelled("Row of byte-llama", row), labelled("Order", order),
            labelled("Ban", ban), labelled("Bias on", biasToken),
            ...[["bias", "Bias"], ["repetition", "Repetition penalty"], ["presence", "Presence"],
                ["frequency", "Frequency"], ["temperature", "Temperature"], ["min_p", "min-p"],
                ["top_k", "top-k"], ["top_p", "top-p"]].map(([id, words]) => labelled(words, sliders[id], said[id]))),
        el("p", {}, reset), context, chain, verdict, plot,
        el("p", { class: "widget-legend" }, [["knob-key-after", "probability now"], ["knob-key-before", "with all knobs off"]].map(([css, words]) =>
            el("span", {}, el("i", { class: css, "aria-hidden": "true" }), words))));
    refill();
    return box;
});
