/* Which bytes may follow while a model writes under a constraint. The document is that of
 * course/site/widgets/allowed_bytes.py: every row is the engine's own. */
"use strict";

CourseWidgets.mount("allowed-bytes", (data) => {
    const { el, svg, labelled, choice, questions, inPage } = CourseWidgets;
    const engine = inPage("course.site.widgets.allowed_bytes", data.bytes);
    const EOS = 256, YOURS = "yours";
    const box = el("section", { class: "widget-box", "aria-label": "The bytes that may follow" });
    const named = (id, field) => { field.dataset.input = id; return field; };
    const select = named("case", choice(Object.keys(data.films), null, () => { place.value = 0; update(); }));
    const place = named("place", el("input", { type: "range", min: 0, max: 1, step: 1, value: 0, oninput: update }));
    const where = el("output");
    const asked = el("p", { class: "allowed-asked" });
    const text = el("p", { class: "allowed-text" });
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const grid = svg("svg", { role: "img", class: "roof-plot allowed-grid" });
    const bars = el("div", { class: "allowed-bars" });

    const NAMES = { 9: "⇥", 10: "↵", 13: "⏎", 32: "␣", 256: "EOS" };
    const visible = (id) => NAMES[id] ?? (id > 32 && id < 127 ? String.fromCharCode(id) : `0x${id.toString(16).padStart(2, "0")}`);
    const percent = (share) => `${(100 * share).toFixed(1)} %`;

    function drawGrid(legal, token) {
        const CELL = 25, parts = [];
        for (let id = 0; id < EOS; id += 1) {
            const x = CELL * (id % 16), y = CELL * Math.floor(id / 16);
            const kind = id === token ? "allowed-taken" : legal.has(id) ? "allowed-legal" : "allowed-not";
            parts.push(svg("rect", { x, y, width: CELL - 2, height: CELL - 2, class: kind },
                svg("title", {}, `${visible(id)}: ${legal.has(id) ? "may follow" : "may not"}`)));
            const shown = id in NAMES || (id > 32 && id < 127);
            if (shown) parts.push(svg("text", { x: x + CELL / 2 - 1, y: y + 17, "text-anchor": "middle" }, visible(id)));
        }
        const kind = token === EOS ? "allowed-taken" : legal.has(EOS) ? "allowed-legal" : "allowed-not";
        parts.push(svg("rect", { x: 0, y: 16 * CELL + 4, width: 3 * CELL - 2, height: CELL - 2, class: kind },
            svg("title", {}, `EOS: ${legal.has(EOS) ? "may follow" : "may not"}`)),
            svg("text", { x: 1.5 * CELL - 1, y: 16 * CELL + 21, "text-anchor": "middle" }, "EOS"));
        grid.setAttribute("viewBox", `0 0 ${16 * CELL} ${17 * CELL + 6}`);
        grid.replaceChildren(svg("title", {}, "The 256 bytes and EOS: filled where they may follow"), ...parts);
    }

    function column(title, pairs, legal) {
        return el("div", { class: "allowed-column" }, el("strong", {}, title),
            pairs.map(([id, share]) => el("div", { class: `allowed-row${legal.has(id) ? "" : " allowed-off"}` },
                el("code", {}, visible(id)),
                el("span", { class: "allowed-track" },
                    el("span", { class: "allowed-bar", style: `width: ${100 * share}%` })),
                el("span", {}, percent(share)))));
    }

    function update() {
        const film = data.films[select.value];
        place.max = film.places.length - 1;
        const at = Math.min(Number(place.value), film.places.length - 1);
        const now = film.places[at];
        const legal = new Set();
        for (const [first, last] of now.allowed) for (let id = first; id <= last; id += 1) legal.add(id);
        const token = film.tokens[at];
        where.textContent = `${at + 1} of ${film.places.length}`;
        place.setAttribute("aria-valuetext", `place ${where.textContent}`);
        asked.textContent = `${film.prompt}… under ${JSON.stringify(film.constraint)}`;
        const said = film.tokens.slice(0, at).map((id) => (id === 10 ? "↵" : id === 32 ? "␣" : visible(id))).join("");
        text.replaceChildren(el("code", {}, said), el("mark", {}, visible(token)));
        drawGrid(legal, token);
        bars.replaceChildren(column("before the mask; grey: may not follow", now.before, legal), column("after it", now.after, legal));
        verdict.textContent = (legal.size === 1 ? "One token may follow: it is forced. " : `${legal.size} tokens may follow. `)
            + `The model gave them ${percent(now.legal)} of its mass. In this text ${film.forced} of ${film.places.length} `
            + `places are forced; it ended with ${film.reason}.`;
        verdict.dataset.count = legal.size;
        verdict.dataset.legal = now.legal;
        verdict.dataset.forced = film.forced;
    }

    /** A constraint of the reader's own: what the engine writes under it, or its words on why it will not. */
    function ownForm() {
        const HELP = { regex: "(cat|dog)s?", choice: "one a line", json: '{"type": "integer", "maximum": 120}' };
        const STARTS = { regex: "(cat|dog)s?", choice: "left\nright", json: '{"type": "object", "properties": {"age": {"type": "integer", "maximum": 120}}, "required": ["age"]}' };
        const kind = named("kind", choice(data.own.kinds, "regex", () => {
            if (Object.values(STARTS).includes(own.value)) own.value = STARTS[kind.value];
            own.placeholder = HELP[kind.value];
        }));
        const own = named("own", el("textarea", { rows: 3, maxlength: data.own.most, spellcheck: "false", placeholder: HELP.regex }));
        own.value = STARTS.regex;
        const prompt = named("prompt", el("input", { type: "text", maxlength: data.own.most_prompt, value: "The answer is ", spellcheck: "false" }));
        const write = el("button", { type: "submit" }, engine.offer("Write under it"));
        const trouble = el("p", { class: "run-trouble", role: "alert" });
        const form = el("form", { class: "typed-form" }, labelled("Kind", kind), labelled("Your constraint", own), labelled("Prompt", prompt), write);
        form.addEventListener("submit", async (event) => {
            event.preventDefault();
            write.disabled = true;
            trouble.textContent = "";
            try {
                const film = await engine.call("typed", { kind: kind.value, text: own.value, prompt: prompt.value });
                if (!data.films[YOURS]) select.append(el("option", {}, YOURS));
                data.films[YOURS] = film;
                select.value = YOURS;
                place.value = 0;
                update();
                select.scrollIntoView({ block: "center" });
            } catch (error) {
                trouble.textContent = `Refused: ${error.message}`;
            }
            write.disabled = false;
            write.textContent = engine.offer("Write under it");
        });
        return [el("h4", {}, "A constraint of your own"), form, engine.box, trouble];
    }

    const posed = questions(data.questions, "Show it", (question) => {
        select.value = question.case;
        place.max = data.films[question.case].places.length - 1;
        place.value = question.place;
        update();
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    box.append(
        ...posed,
        el("div", { class: "widget-form" }, labelled("Constraint", select), labelled("Place", place, where)),
        asked, text, grid,
        el("p", { class: "slots-key" }, el("span", { class: "slots-swatch allowed-swatch-legal" }), "may follow ",
            el("span", { class: "slots-swatch allowed-swatch-taken" }), "what the model took; a square without a letter is a byte without one"),
        bars, verdict, ...(engine ? ownForm() : []));
    update();
    return box;
});
