/* A request that grows through groups of layers, and which of its blocks live. The document is that of
 * course/site/widgets/layer_blocks.py: every table is the engine's own. */
"use strict";

CourseWidgets.mount("layer-blocks", (data) => {
    const { el, svg, plural, labelled, choice, questions } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "Groups of layers and their blocks" });
    const named = (id, field) => { field.dataset.input = id; return field; };
    const layers = named("layers", choice(Object.keys(data.layers), null, () => begin()));
    const budget = named("budget", choice(data.budgets.map(String), "64", () => begin()));
    const step = named("step", el("input", { type: "range", min: 0, max: 0, step: 1, value: 0, oninput: () => update() }));
    const said = el("output");
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const plot = svg("svg", { role: "img", class: "roof-plot slots-plot" });
    const film = () => data.films[layers.value][budget.value];
    const KEEPS = { all: "sees all", state: "states" };
    const COLOURS = "ABC";

    function draw(now, before) {
        const kinds = data.layers[layers.value], LINE = 30, L = 74, W = 400;
        const most = film()[film().length - 1].tables[0].length, cell = (W - L) / most;
        const parts = [];
        kinds.forEach((kind, group) => {
            const y = 4 + LINE * group;
            parts.push(svg("text", { x: L - 6, y: y + 16, "text-anchor": "end" }, KEEPS[kind] || `window ${kind}`));
            now.tables[group].forEach((block, place) => {
                const fresh = place >= (before ? before.tables[group].length : 0);
                const says = block ? `block ${block}${fresh ? ", taken in this step" : ""}` : "null block: given back";
                parts.push(svg("rect", {
                    x: L + cell * place, y, width: cell - 2, height: LINE - 8,
                    class: block ? `slots-${COLOURS[group]}` : "slots-w", "fill-opacity": fresh ? 0.9 : 0.45,
                }, svg("title", {}, `group ${group}, tokens ${place * data.block_size} on: ${says}`)),
                svg("text", { x: L + cell * place + cell / 2 - 1, y: y + 16, "text-anchor": "middle" }, block));
            });
        });
        plot.setAttribute("viewBox", `0 0 ${W + 2} ${LINE * kinds.length + 4}`);
        plot.replaceChildren(svg("title", {}, "One row a group, one column a block of the request's tokens"), ...parts);
    }

    function update() {
        const at = Number(step.value), now = film()[at];
        said.textContent = `step ${at + 1} of ${film().length}`;
        step.setAttribute("aria-valuetext", said.textContent);
        draw(now, film()[at - 1]);
        verdict.textContent = `${plural(now.tokens, "token")}: the request holds ${plural(now.held, "block")}; ${now.free} are free.`;
        verdict.dataset.held = now.held;
        verdict.dataset.free = now.free;
    }

    function begin(at = 0) {
        step.max = film().length - 1;
        step.value = at;
        update();
    }

    const posed = questions(data.questions, "Run it", (question) => {
        layers.value = question.layers;
        budget.value = String(question.budget);
        begin(question.step);
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    box.append(
        ...posed,
        el("div", { class: "widget-form" }, labelled("Each group sees", layers), labelled("Tokens a step", budget), labelled("Step", step, said)),
        plot,
        el("p", { class: "widget-legend" }, "A number is a block; full colour: taken in this step; 0: the null block, where a block was given back."),
        verdict);
    begin();
    return box;
});
