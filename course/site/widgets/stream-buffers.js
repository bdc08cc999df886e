/* A text in pieces of a length the reader chooses: what is sent for each, what is held. The document
 * is that of course/site/widgets/stream_buffers.py: every delta is the engine's own parser's. */
"use strict";

CourseWidgets.mount("stream-buffers", (data) => {
    const { el, labelled, choice, questions, plural } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "A stream in pieces, and what a tag parser holds" });
    const named = (id, field) => { field.dataset.input = id; return field; };
    const text = named("text", choice(Object.keys(data.texts), null, update));
    const length = named("length", el("input", {
        type: "range", min: 0, max: data.lengths.length - 1, step: 1, value: 3, oninput: update,
    }));
    const said = el("output");
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const rows = el("tbody");
    const table = el("div", { class: "table-wrapper", tabindex: 0, role: "region", "aria-label": "Piece by piece" },
        el("table", { class: "stream-table" },
            el("thead", {}, el("tr", {}, ...["piece", "sent", "held"].map((words) => el("th", { scope: "col" }, words)))),
            rows));

    const visible = (piece) => piece.replaceAll(" ", "␣").replaceAll("\n", "↵");

    function sent(step) {
        const parts = [];
        if (step.content) parts.push(el("span", { class: "stream-content" }, visible(step.content)));
        if (step.name) parts.push(el("span", { class: "stream-name" }, `call ${step.name}`));
        if (step.arguments) parts.push(el("span", { class: "stream-arguments" }, visible(step.arguments)));
        return parts.length ? parts : ["nothing"];
    }

    function update() {
        const size = data.lengths[length.value];
        const film = data.films[text.value][size];
        said.textContent = size > 500 ? "all at once" : `${size} character${size === 1 ? "" : "s"}`;
        length.setAttribute("aria-valuetext", said.textContent);
        rows.replaceChildren(...film.steps.map((step) => el("tr", {},
            el("td", {}, el("code", {}, visible(step.piece))),
            el("td", {}, ...sent(step)),
            el("td", {}, step.held ? el("code", {}, visible(step.held)) : ""))));
        verdict.textContent = `Something is sent for ${film.deltas} of ${film.steps.length} pieces; at most ${film.held} `
            + `characters are held; ${plural(film.content.length, "character")} of content and ${plural(film.calls, "call")} in all.`;
        verdict.dataset.deltas = film.deltas;
        verdict.dataset.held = film.held;
        verdict.dataset.calls = film.calls;
        verdict.dataset.content = film.content.length;
    }

    const posed = questions(data.questions, "Cut it", (question) => {
        text.value = question.text;
        length.value = data.lengths.indexOf(question.length);
        update();
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    box.append(
        ...posed,
        el("div", { class: "widget-form" }, labelled("Text", text), labelled("A piece", length, said)),
        verdict, table);
    update();
    return box;
});
