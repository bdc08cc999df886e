/* Pictures of sizes dropped into two prompts: tokens, the encoder's budget, what runs again. The
 * document is that of course/site/widgets/picture_budget.py: every step is the engine's own plan. */
"use strict";

CourseWidgets.mount("picture-budget", (data) => {
    const { el, svg, plural, labelled, choice, questions } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "Pictures in two prompts, step by step" });
    const named = (id, field) => { field.dataset.input = id; return field; };
    const all = Object.keys(data.sizes), some = all.filter((name) => data.sizes[name]);
    const first = named("first", choice(some, "1280 x 960", () => begin()));
    const second = named("second", choice(all, "640 x 480", () => begin()));
    const third = named("third", choice(all, "336 x 336", () => begin()));
    const budget = named("budget", choice(data.budgets.map(String), "512", () => begin()));
    const same = named("same", choice(["yes", "no"], "yes", () => begin()));
    const step = named("step", el("input", { type: "range", min: 0, max: 0, step: 1, value: 0, oninput: () => update() }));
    const said = el("output");
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const plot = svg("svg", { role: "img", class: "roof-plot slots-plot" });
    const film = () => data.films[[first.value, second.value, third.value, budget.value, same.value === "yes" ? 1 : 0].join("|")];
    const rows = (made) => Object.fromEntries([first, second, third].map((field, i) => [made.names[i], data.sizes[field.value]]));

    function draw(made, at) {
        const L = 74, W = 400, LINE = 30, size = rows(made), parts = [];
        const [a, b, runs, cached] = made.steps[at];
        const bar = (line, words, most, each) => {
            const y = 4 + LINE * line;
            let x = L;
            parts.push(svg("text", { x: L - 6, y: y + 16, "text-anchor": "end" }, words),
                svg("rect", { x: L, y, width: W - L, height: LINE - 8, class: "slots-w", "fill-opacity": 0.2 }));
            for (const [name, count, css] of each) {
                const width = (W - L) * count / most;
                parts.push(svg("rect", { x, y, width: Math.max(0, width - 1), height: LINE - 8, class: `slots-${css}`, "fill-opacity": 0.7 },
                    svg("title", {}, `${name}: ${count} of ${most}`)));
                if (width > 26) parts.push(svg("text", { x: x + width / 2, y: y + 16, "text-anchor": "middle" }, `${name} ${count}`));
                x += width;
            }
        };
        const pictures = (letters) => [...letters].map((letter) => [letter, size[letter], "abc".indexOf(letter) % 2 ? "B" : "A"]);
        bar(0, "tokens", Number(budget.value), [["A", a, "A"], ["B", b, "B"]].filter((each) => each[1]));
        bar(1, "encoder", made.size, pictures(runs));
        bar(2, "cache", made.size, pictures(cached));
        plot.setAttribute("viewBox", `0 0 ${W + 2} ${LINE * 3 + 4}`);
        plot.replaceChildren(svg("title", {}, "What the step takes of its budget of tokens and of embeddings, and what is cached"), ...parts);
    }

    function update() {
        const made = film(), at = Number(step.value);
        const done = made.steps.slice(0, at + 1).map((each) => each[2]).join("");
        const again = done.length - new Set(done).size;
        said.textContent = `step ${at + 1} of ${made.steps.length}`;
        step.setAttribute("aria-valuetext", said.textContent);
        draw(made, at);
        const evicted = made.steps[at][4];
        verdict.textContent = `A has ${plural(made.tokens[0], "token")}, B ${made.tokens[1]}. Encoders ran ${plural(done.length, "time")} so far, ${again} of them again`
            + `${evicted ? `; evicted in this step: ${[...evicted].join(", ")}` : ""}.`;
        verdict.dataset.runs = done.length;
        verdict.dataset.again = again;
    }

    function begin(at = 0) {
        step.max = film().steps.length - 1;
        step.value = at;
        update();
    }

    const posed = questions(data.questions, "Run it", (question) => {
        [first.value, second.value, third.value] = question.sizes;
        budget.value = String(question.budget);
        same.value = question.same ? "yes" : "no";
        begin(1e9);
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    box.append(
        ...posed,
        el("div", { class: "widget-form" }, labelled("A's first picture", first), labelled("A's second", second), labelled("B's picture", third),
            labelled("Tokens a step", budget), labelled("Equal sizes are one picture", same), labelled("Step", step, said)),
        plot,
        el("p", { class: "widget-legend" }, "Letters are pictures. The encoder's budget and its cache are the step's tokens, or the largest picture's embeddings if they are more."),
        verdict);
    begin();
    return box;
});
