/* Which attention backend is taken, and what the others object to. The document is that of
 * course/site/widgets/backend_choice.py: every answer is one that the real selector gave. */
"use strict";

/** The recorded outcome of a combination: {valid: names, rejected: [[name, reasons], ...]}. */
CourseWidgets.formulas.backendOutcome = (data, picked) => {
    const lists = [data.gpus, data.layers, ...Object.values(data.axes)];
    const keys = ["gpu", "layer", ...Object.keys(data.axes)];
    const place = lists.reduce((sum, list, i) => sum * list.length + list.indexOf(picked[keys[i]]), 0);
    const [valid, rejected] = data.outcomes[parseInt(data.table.slice(3 * place, 3 * place + 3), 36)];
    return { valid: valid.map((b) => data.backends[b]),
        rejected: rejected.map(([b, ...why]) => [data.backends[b], why.map((r) => data.reasons[r])]) };
};

CourseWidgets.mount("backend-choice", (data) => {
    const { el, labelled, formulas } = CourseWidgets;
    const { ask, keepKeys } = CourseDecide;
    const box = el("section", { class: "widget-box decide", "aria-label": "The backend selector" });
    const WORDS = {
        gpu: ["GPU", data.gpus, (v) => v], layer: ["Attention", data.layers, (v) => v],
        head_size: ["Head size", data.axes.head_size, String], dtype: ["Data type", data.axes.dtype, String],
        kv_cache_dtype: ["KV cache", data.axes.kv_cache_dtype, String],
        block_size: ["--block-size", data.axes.block_size, (v) => (v === null ? "not given" : `${v}`)],
    };
    const fields = Object.fromEntries(Object.entries(WORDS).map(([name, [, values, text]]) => [name,
        el("select", { "data-input": name, onchange: () => show(name) }, values.map((v, i) => el("option", { value: i }, text(v))))]));
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const list = el("ul", { class: "choice-list" });
    let before = null;

    const picked = () => Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, WORDS[name][1][Number(field.value)]]));
    function set(to) {
        for (const [name, value] of Object.entries(to)) fields[name].value = WORDS[name][1].indexOf(value);
        before = null;
        show(null);
    }

    function show(changed) {
        const now = picked();
        const { valid, rejected } = formulas.backendOutcome(data, now);
        const chosen = valid[0] || "an error";
        const was = before?.chosen;
        const fresh = (name, reason) => before && !(before.reasons[name] || []).includes(reason);
        said.textContent = (valid.length ? `vLLM takes ${chosen}.` : "Nobody is left: vLLM does not start.")
            + (changed && was && was !== chosen ? ` Before this change it was ${was}.` : "")
            + (changed && was === chosen ? " As before this change." : "")
            + (changed && rejected.some(([name, why]) => why.some((reason) => fresh(name, reason))) ? " Marked: objections that are new." : "");
        said.dataset.chosen = valid[0] || "";
        list.replaceChildren(
            ...valid.map((name, i) => el("li", { class: i ? "choice-ok" : "choice-taken", "data-backend": name },
                el("code", {}, name), el("span", {}, i ? "no objection, but not first" : "taken: the first without objection"))),
            ...rejected.map(([name, why]) => el("li", { class: "choice-no", "data-backend": name }, el("code", {}, name),
                el("span", {}, why.map((reason, i) => [i ? "; " : "", fresh(name, reason) ? el("mark", {}, reason) : reason])))));
        before = { chosen, reasons: Object.fromEntries(rejected) };
    }

    keepKeys(box);
    box.append(ask(data.questions, (posed) => set(posed.picked)),
        el("div", { class: "widget-form choice-form" }, Object.entries(fields).map(([name, field]) => labelled(WORDS[name][0], field))),
        said, list);
    set(data.start);
    return box;
});
