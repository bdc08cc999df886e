/* A linear layer cut between ranks; ranks change places, and what moves is said. The document is
 * that of course/site/widgets/shard_matrix.py: products and bytes are the engine's own. */
"use strict";

CourseWidgets.mount("shard-matrix", (data) => {
    const { el, svg, count, labelled, choice, questions } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "A matrix cut between ranks" });
    const named = (id, field) => { field.dataset.input = id; return field; };
    const words = Object.values(data.kinds), kinds = Object.keys(data.kinds);
    const cut = named("cut", choice(words, null, update));
    const ranks = named("ranks", choice(data.ranks.map(String), "2", dealt));
    const size = named("size", choice(data.sizes, null, update));
    const tokens = named("tokens", choice(data.tokens.map(String), null, update));
    const places = el("div", { class: "shard-ranks", role: "group", "aria-label": "Which rank holds which slice" });
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const moves = el("p", { class: "film-say" });
    const plot = svg("svg", { role: "img", class: "roof-plot shard-plot" });
    let order = [0, 1];
    let picked = null;

    const kind = () => kinds[words.indexOf(cut.value)];
    const film = () => data.cuts[kind()][order.join("")];

    function dealt() {
        order = [...Array(Number(ranks.value)).keys()];
        picked = null;
        update();
    }

    function swap(one, other) {
        picked = null;
        [order[one], order[other]] = [order[other], order[one]];
        update();
        places.children[other].focus();
    }

    /** One chip a rank: drag it onto another, or press one and then the other. */
    function chip(rank) {
        const made = el("button", {
            type: "button", draggable: "true", class: `shard-chip shard-line-${rank}`,
            "aria-pressed": String(picked === rank),
            onclick: () => {
                if (picked === null || picked === rank) {
                    picked = picked === rank ? null : rank;
                    [...places.children].forEach((each, i) => each.setAttribute("aria-pressed", String(picked === i)));
                } else swap(picked, rank);
            },
            ondragstart: (event) => event.dataTransfer.setData("text/plain", String(rank)),
            ondragover: (event) => event.preventDefault(),
            ondrop: (event) => {
                event.preventDefault();
                const from = Number(event.dataTransfer.getData("text/plain"));
                if (from !== rank) swap(from, rank);
            },
        }, `rank ${rank}: slice ${order[rank]}`);
        made.dataset.rank = rank;
        return made;
    }

    const CELL = 34;
    function cells(parts, x, y, values, owners, title) {
        values.forEach((value, i) => parts.push(
            svg("rect", { x: x + i * CELL, y, width: CELL - 3, height: 24, rx: 3, class: owners[i] === null ? "shard-all" : `shard-${owners[i]}` },
                svg("title", {}, title(i))),
            svg("text", { x: x + i * CELL + (CELL - 3) / 2, y: y + 17, "text-anchor": "middle" }, String(value))));
    }

    function draw(state, byOutputs) {
        const parts = [], n = order.length;
        const owned = (rank) => (rank === null ? "on every rank" : `on rank ${rank}`);
        const text = (x, y, said) => parts.push(svg("text", { x, y, class: "shard-word" }, said));
        text(0, 14, "x");
        const ofX = data.x.map((_, i) => (byOutputs ? null : state.owner[i]));
        cells(parts, 0, 22, data.x, ofX, (i) => `x[${i}], ${owned(ofX[i])}`);
        text(0, 74, "W");
        data.weight.forEach((row, r) => {
            const of = row.map((_, c) => state.owner[byOutputs ? r : c]);
            cells(parts, 0, 82 + r * 28, row, of, (c) => `W[${r}][${c}], ${owned(of[c])}`);
        });
        const left = 172;
        text(left, 14, byOutputs ? "outputs of each rank" : "addends of each rank");
        state.parts.forEach((part, rank) =>
            cells(parts, left, 22 + rank * 28, part, part.map(() => rank), () => `computed by rank ${rank}`));
        const under = 166;
        text(left, under, n === 1 ? "y" : byOutputs ? "side by side, by rank" : "added up");
        let at = 0;
        const from = byOutputs ? state.parts.flatMap((part, rank) => part.map(() => rank)) : data.y.map(() => null);
        cells(parts, left, under + 8, state.together, from, () => `output ${at++}`);
        plot.setAttribute("viewBox", "0 0 312 202");
        plot.replaceChildren(svg("title", {}, "Cells in the colour of the rank that holds them; grey: on every rank"), ...parts);
    }

    function update() {
        const byOutputs = kind() === "outputs", state = film(), n = order.length;
        const bill = data.bills[kind()][size.value][ranks.value][tokens.value];
        places.replaceChildren(...order.map((_, rank) => chip(rank)));
        draw(state, byOutputs);
        verdict.textContent = state.wrong === 0 ? `y is (${state.together.join(", ")}), as of the whole layer.`
            : `${state.wrong} of ${data.y.length} outputs stand in the wrong place: y should be (${data.y.join(", ")}).`;
        verdict.dataset.wrong = state.wrong;
        const plural = tokens.value === "1" ? "token" : "tokens";
        const held = `Of ${size.value}, a rank holds ${count(bill.weights)} weights and, for ${count(Number(tokens.value))} ${plural}, `
            + `${count(bill.x)} numbers of x. `;
        const sent = n === 1 ? "Nothing moves."
            : byOutputs ? `If all shall have all outputs, it sends ${count(bill.sent)} bytes: an all-gather. If a row-parallel layer comes next, nothing.`
                : `It sends ${count(bill.sent)} bytes: an all-reduce.`;
        moves.textContent = held + sent;
        moves.dataset.sent = bill.sent;
        moves.dataset.weights = bill.weights;
    }

    const posed = questions(data.questions, "Show it", (question) => {
        cut.value = data.kinds[question.kind];
        ranks.value = String(question.order.length);
        order = [...question.order];
        picked = null;
        size.value = question.size;
        tokens.value = String(question.tokens);
        update();
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    box.append(
        ...posed,
        el("div", { class: "widget-form" }, labelled("Cut W", cut), labelled("Ranks", ranks)),
        el("p", { class: "shard-how" }, "Drag one rank onto another, or press both, and they change slices."),
        places, plot, verdict,
        el("div", { class: "widget-form" }, labelled("Count the bytes of", size), labelled("Tokens", tokens)),
        moves);
    update();
    return box;
});
