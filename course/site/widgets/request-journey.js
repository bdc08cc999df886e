/* One request from the call to its text: a hop at a time. The document is that of
 * course/site/widgets/request_journey.py: every field was read off the engine's own objects. */
"use strict";

CourseWidgets.mount("request-journey", (data) => {
    const { el, stepper, questions } = CourseWidgets;
    const box = el("section", { class: "widget-box journey", "aria-label": "One request on its way" });
    const SIDES = { front: "front end", wire: "between", core: "engine core" };
    /** Column and row of every hop: down through the core, round the loop, and back. */
    const PLACES = { call: [1, 2], tokenize: [1, 3], send: [2, 3], request: [3, 3], schedule: [3, 4], execute: [3, 5],
        sample: [3, 6], update: [3, 7], news: [2, 7], detokenize: [1, 7], output: [1, 8] };
    const ARROWS = { call: "↓", tokenize: "→", send: "→", request: "↓", schedule: "↓", execute: "↓", sample: "↓", update: "←", news: "←", detokenize: "↓", output: "" };
    let place = 0;

    const buttons = Object.fromEntries(Object.entries(data.hops).map(([name, hop]) => {
        const [column, row] = PLACES[name];
        return [name, el("button", {
            type: "button", "data-hop": name, class: `hop hop-${hop.side}`, style: `grid-column: ${column}; grid-row: ${row}`,
            onclick: () => go(nearest(name)),
        }, el("span", {}, hop.title), el("span", { class: "hop-arrow", "aria-hidden": "true" }, ARROWS[name]))];
    }));
    const loop = el("span", { class: "hop-loop" });
    const map = el("div", { class: "hop-list", role: "group", "aria-label": "The hops; press one for what it carries" },
        Object.values(SIDES).map((words, at) => el("span", { class: "hop-side", style: `grid-column: ${at + 1}; grid-row: 1` }, words)),
        Object.values(buttons), loop);
    const title = el("h4", {});
    const does = el("p", { class: "hop-does" });
    const fields = el("dl", { class: "hop-fields" });
    const source = el("p", { class: "hop-source" });
    const card = el("div", { class: "hop-card", "aria-live": "polite" }, title, does, fields, source);

    /** The stop of this hop in the present step; else the next one of it, else its last. */
    function nearest(name) {
        const step = data.stops[place].step;
        const all = data.stops.map((stop, at) => ({ ...stop, at })).filter((stop) => stop.hop === name);
        return (all.find((stop) => stop.step === step) || all.find((stop) => stop.step > step) || all.at(-1)).at;
    }

    function show(at) {
        place = at;
        const stop = data.stops[at], hop = data.hops[stop.hop];
        const before = data.stops[at - 1];
        for (const [name, button] of Object.entries(buttons)) {
            button.classList.toggle("hop-here", name === stop.hop);
            button.classList.toggle("hop-past", data.stops.slice(0, at).some((each) => each.hop === name && (each.step === stop.step || each.step === 0)));
            button.setAttribute("aria-current", name === stop.hop ? "step" : "false");
        }
        loop.textContent = stop.step ? `step ${stop.step} of ${data.stops.at(-1).step}` : "before step 1";
        title.textContent = `${hop.title}: ${hop.carries}`;
        does.textContent = hop.does + (stop.hop === "schedule" && before.hop === "update" ? " Nothing went back: no token was sampled." : "");
        const last = data.stops.slice(0, at).reverse().find((each) => each.hop === stop.hop);
        fields.replaceChildren(...Object.entries(stop.fields).map(([name, value]) =>
            el("div", { class: last && last.fields[name] !== value ? "hop-new" : "" }, el("dt", {}, name), el("dd", {}, el("code", {}, value)))));
        source.replaceChildren("vLLM: ", el("a", { href: hop.link }, hop.line.split(/(?<=[/_])/).flatMap((part) => [part, el("wbr")])), ` ${hop.symbol}`);
        card.dataset.hop = stop.hop;
        card.dataset.step = stop.step;
    }

    const posed = questions(data.questions, "Show it", (question) => go(question.stop));
    const [controls, go] = stepper(box, data.stops.length, "hop", show);
    box.append(el("p", { class: "widget-title" }, "One request, hop by hop: press a hop, or Play"), ...posed, controls,
        el("div", { class: "look-both" }, map, card),
        el("p", { class: "hop-note" }, "Values: mini_vllm's own, read while it served this request. Marked: changed since the last time round."));
    go(0);
    return box;
});
