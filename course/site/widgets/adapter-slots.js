/* Adapters that arrive one by one, and who waits for a slot. The document is that of
 * course/site/widgets/adapter_slots.py: every step is the engine's own. */
"use strict";

CourseWidgets.mount("adapter-slots", (data) => {
    const { el, svg, labelled, choice, questions } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "Adapters, slots, and who waits" });
    const named = (id, field) => { field.dataset.input = id; return field; };
    const pattern = named("pattern", choice(Object.keys(data.patterns), null, update));
    const slots = named("slots", el("input", {
        type: "range", min: data.slots[0], max: data.slots[data.slots.length - 1], step: 1, value: 2, oninput: update,
    }));
    const said = el("output");
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const plot = svg("svg", { role: "img", class: "roof-plot slots-plot" });
    const STATES = { r: "runs", w: "waits for a place", s: "set aside, no slot for its adapter" };

    function draw(film, letters) {
        const LINE = 22, L = 46, T = 8, steps = film.steps.length;
        const W = 400, cell = (W - L) / steps, H = T + LINE * letters.length + 44;
        const parts = [];
        [...letters].forEach((letter, request) => {
            parts.push(svg("text", { x: L - 8, y: T + LINE * request + 15, "text-anchor": "end" },
                letter === "-" ? "base" : letter));
            film.steps.forEach((step, at) => {
                const state = step.states[request];
                if (state === ".") return;
                parts.push(svg("rect", {
                    x: L + cell * at, y: T + LINE * request + 3, width: cell - 1, height: LINE - 6,
                    class: state === "r" ? `slots-run slots-${letter === "-" ? "base" : letter}` : `slots-${state}`,
                }, svg("title", {}, `step ${at}: request ${request}, ${letter === "-" ? "no adapter" : `adapter ${letter}`}, ${STATES[state]}`)));
            });
        });
        const under = T + LINE * letters.length;
        film.steps.forEach((step, at) => {
            if (!step.loads.length) return;
            parts.push(svg("text", { x: L + cell * (at + 0.5), y: under + 16, "text-anchor": "middle" }, step.loads.join("")));
        });
        parts.push(svg("text", { x: L - 8, y: under + 16, "text-anchor": "end" }, "load"),
            svg("text", { x: L, y: under + 36 }, "step 0"),
            svg("text", { x: W, y: under + 36, "text-anchor": "end" }, `step ${steps - 1}`));
        plot.setAttribute("viewBox", `0 0 ${W + 4} ${H}`);
        plot.replaceChildren(svg("title", {}, "One row a request, one column a step: filled while it runs"), ...parts);
    }

    function update() {
        const letters = data.patterns[pattern.value];
        const film = data.films[pattern.value][slots.value];
        said.textContent = `${slots.value} slot${slots.value === "1" ? "" : "s"}`;
        slots.setAttribute("aria-valuetext", said.textContent);
        draw(film, letters);
        verdict.textContent = `All have ended after ${film.last} steps; ${film.waited} steps were spent waiting, `
            + `all requests together; ${film.loads} loads into slots.`;
        verdict.dataset.last = film.last;
        verdict.dataset.waited = film.waited;
        verdict.dataset.loads = film.loads;
    }

    const posed = questions(data.questions, "Run it", (question) => {
        pattern.value = question.pattern;
        slots.value = question.slots;
        update();
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    box.append(
        ...posed,
        el("div", { class: "widget-form" }, labelled("Who arrives, one a step", pattern), labelled("Slots", slots, said)),
        plot,
        el("p", { class: "widget-legend" }, [["r", "runs, in its adapter's colour"], ["s", "set aside: no slot"],
            ["w", `waits: ${data.max_num_seqs} run already`]].map(([css, words]) =>
            el("span", {}, el("span", { class: `slots-swatch slots-swatch-${css}`, "aria-hidden": "true" }), words)),
        el("span", {}, "A row is a request, named by its adapter; load: an adapter enters a slot.")),
        verdict);
    update();
    return box;
});
