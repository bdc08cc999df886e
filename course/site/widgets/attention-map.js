/* The shipped model over a text: its bytes, where each head looks, and what may follow. The document is that
 * of course/site/widgets/attention_map.py; `look` there answers for texts that the reader types. */
"use strict";

/** The law of the next byte under temperature and top-p, as `kept` gives it. */
CourseWidgets.formulas.nextByte = (logits, temperature, topP) => {
    const most = Math.max(...logits);
    const best = logits.indexOf(most);
    if (temperature === 0) return logits.map((_, id) => (id === best ? 1 : 0));
    const softmax = (row) => {
        const weights = row.map((z) => Math.exp((z - most) / temperature));
        const sum = weights.reduce((a, b) => a + b, 0);
        return weights.map((w) => w / sum);
    };
    if (topP >= 1) return softmax(logits);
    const law = softmax(logits);
    const order = logits.map((_, id) => id).sort((a, b) => logits[b] - logits[a] || a - b);
    const kept = new Set([best]);
    let before = 0;
    for (const id of order) {
        if (before < topP) kept.add(id);
        before += law[id];
    }
    return softmax(logits.map((z, id) => (kept.has(id) ? z : -Infinity)));
};

CourseWidgets.mount("attention-map", (data) => {
    const { el, svg, labelled, choice, questions, formulas, inPage } = CourseWidgets;
    const engine = inPage("course.site.widgets.attention_map", data.bytes);
    const names = Object.keys(data.texts);
    let now = data.texts[names[0]];
    let shown = names[0];
    let asked = 0;
    const box = el("section", { class: "widget-box look", "aria-label": "Inside the shipped model" });
    const named = (id, field) => { field.dataset.input = id; return field; };
    const NAMES = { 9: "⇥", 10: "↵", 13: "⏎", 32: "␣", 256: "EOS" };
    const visible = (id) => NAMES[id] ?? (id > 32 && id < 127 ? String.fromCharCode(id) : `0x${id.toString(16).padStart(2, "0")}`);
    const percent = (share) => (share > 0 && share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);
    const range = (id, min, max, step, value) => named(id, el("input", { type: "range", min, max, step, value, oninput: draw }));
    const outs = Object.fromEntries(["layer", "head", "place", "temperature", "top_p"].map((id) => [id, el("output")]));

    const typed = named("text", el("input", { type: "text", value: shown, maxlength: data.most, spellcheck: "false", autocomplete: "off" }));
    const run = el("button", { type: "submit" }, "Run");
    const form = el("form", { class: "look-form" }, engine
        ? [labelled("Your text", typed), run]
        : labelled("Text", choice(names, shown, (event) => take(event.target.value, data.texts[event.target.value]))));
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        if (engine) ask(typed.value);
    });
    const trouble = el("p", { class: "run-trouble", role: "alert" });
    const strip = el("div", { class: "look-strip", role: "group", "aria-label": "Bytes of the text; choose who looks" });
    const layer = range("layer", 0, now.maps.length - 1, 1, 1);
    const head = range("head", 0, now.maps[0].length - 1, 1, 3);
    const place = range("place", 0, now.bytes.length - 1, 1, now.bytes.length - 1);
    const plot = svg("svg", { role: "img", class: "look-map" });
    const looks = el("p", { class: "film-say", "aria-live": "polite" });
    const temperature = range("temperature", 0, 2, 0.1, 1);
    const topP = range("top_p", 0.05, 1, 0.05, 1);
    const bars = el("div", { class: "allowed-column look-bars" });
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });

    /** Row `query` of a packed map: two base-36 digits a weight, in thousandths. */
    const rowOf = (packed, query) => {
        const start = query * (query + 1);
        return Array.from({ length: query + 1 }, (_, key) => parseInt(packed.slice(start + 2 * key, start + 2 * key + 2), 36) / 1000);
    };

    function take(text, answer) {
        shown = text;
        now = answer;
        place.max = now.bytes.length - 1;
        place.value = place.max;
        draw();
    }

    async function ask(text) {
        if (data.texts[text]) {
            trouble.textContent = "";
            return take(text, data.texts[text]);
        }
        const mine = (asked += 1);
        run.disabled = true;
        try {
            const answer = await engine.call("look", { text });
            if (mine === asked) {
                trouble.textContent = "";
                take(text, answer);
            }
        } catch (error) {
            trouble.textContent = error.message;
        }
        run.disabled = false;
        run.textContent = engine.offer("Run");
    }

    function add(id) {
        typed.value = new TextDecoder().decode(new Uint8Array([...now.bytes, id]));
        ask(typed.value);
    }

    function drawMap(packed, query) {
        const n = now.bytes.length, CELL = 16, NAMED = 24; // letters on more rows could not be read
        const L = n <= NAMED ? 18 : 2;
        const parts = [svg("rect", { x: L, y: L + CELL * query, width: CELL * (query + 1), height: CELL, class: "look-row" })];
        for (let row = 0; row < n; row += 1) {
            if (n <= NAMED) {
                parts.push(svg("text", { x: L - 4, y: L + CELL * row + 12, "text-anchor": "end", class: row === query ? "look-here" : "" }, visible(now.bytes[row]).slice(0, 2)),
                    svg("text", { x: L + CELL * (row + 0.5), y: L - 5, "text-anchor": "middle" }, visible(now.bytes[row]).slice(0, 2)));
            }
            rowOf(packed, row).forEach((weight, key) => parts.push(svg("rect", {
                x: L + CELL * key + 0.5, y: L + CELL * row + 0.5, width: CELL - 1, height: CELL - 1, class: "look-cell", "fill-opacity": weight,
            }, svg("title", {}, `${visible(now.bytes[row])} at ${row} reads ${visible(now.bytes[key])} at ${key}: ${percent(weight)}`))));
        }
        plot.setAttribute("viewBox", `0 0 ${L + CELL * n + 2} ${L + CELL * n + 2}`);
        plot.replaceChildren(svg("title", {}, "One row a position, one column each position that it may read; full squares are read most"), ...parts);
    }

    function draw() {
        const query = Number(place.value);
        const packed = now.maps[layer.value][head.value];
        const weights = rowOf(packed, query);
        outs.layer.textContent = `${layer.value} (0 to ${layer.max})`;
        outs.head.textContent = `${head.value} (0 to ${head.max})`;
        outs.place.textContent = `${query}: ${visible(now.bytes[query])}`;
        const focused = document.activeElement?.dataset?.byte;
        strip.replaceChildren(...now.bytes.map((id, at) => el("button", {
            type: "button", "data-byte": at, class: at === query ? "look-byte look-chosen" : "look-byte", "aria-pressed": at === query,
            "aria-label": `position ${at}, byte ${id}, ${visible(id)}`, style: `--w: ${Math.round(100 * (weights[at] ?? 0))}%`,
            onclick: () => { place.value = at; draw(); },
        }, el("b", {}, visible(id)), el("small", {}, id))));
        if (focused) strip.querySelector(`[data-byte="${focused}"]`)?.focus();
        drawMap(packed, query);
        const most = weights.indexOf(Math.max(...weights));
        looks.textContent = `Layer ${layer.value}, head ${head.value}: ${visible(now.bytes[query])} at ${query} takes ${percent(weights[most])} `
            + `of what it reads from ${most === query ? "itself" : `${visible(now.bytes[most])} at ${most}`}.`;
        looks.dataset.most = most;
        drawNext();
    }

    function drawNext() {
        const t = Number(temperature.value), p = Number(topP.value);
        outs.temperature.textContent = t === 0 ? "0, greedy" : String(t);
        outs.top_p.textContent = p === 1 ? "off" : String(p);
        for (const [id, field] of Object.entries({ layer, head, place, temperature, top_p: topP })) {
            field.setAttribute("aria-valuetext", outs[id].textContent);
        }
        const law = formulas.nextByte(now.logits, t, p);
        const plain = formulas.nextByte(now.logits, 1, 1);
        const ids = plain.map((_, id) => id).sort((a, b) => plain[b] - plain[a] || a - b).slice(0, 8);
        const longest = Math.max(...ids.map((id) => law[id]));
        const focused = bars.contains(document.activeElement);
        bars.replaceChildren(...ids.map((id) => el("div", { class: `allowed-row${law[id] > 0 ? "" : " allowed-off"}` },
            engine && id !== 256
                ? el("button", { type: "button", title: `Add ${visible(id)} to the text`, "aria-label": `Add ${visible(id)}`, onclick: () => add(id) }, visible(id))
                : el("code", {}, visible(id)),
            el("span", { class: "allowed-track" }, el("span", { class: "allowed-bar", style: `width: ${100 * law[id] / longest}%` })),
            el("span", {}, percent(law[id])))));
        if (focused) bars.querySelector("button")?.focus();
        const left = law.filter((share) => share > 0).length;
        verdict.textContent = t === 0 ? `Greedy: ${visible(ids[0])}, whatever the odds.`
            : `${left} of ${law.length} tokens can come next; ${visible(ids[0])} is the likeliest.`;
        verdict.dataset.left = left;
    }

    const posed = questions(data.questions, "Show it", (question) => {
        typed.value = names[0];
        temperature.value = question.temperature;
        topP.value = question.top_p;
        take(names[0], data.texts[names[0]]);
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    if (engine) {
        run.textContent = engine.offer("Run");
        form.append(el("span", { class: "look-ready" }, names.map((name) => el("button", { type: "button",
            onclick: () => { typed.value = name; ask(name); } }, name))));
    }
    box.append(el("p", { class: "widget-title" }, "Inside byte-llama: type, pick a head, see who reads whom"), ...posed, form, ...(engine ? [engine.box] : []), trouble,
        strip, el("div", { class: "look-both" },
            el("div", {}, plot, el("p", { class: "hop-note" }, "A row: who looks. A column: what is read. A full square: all of it.")),
            el("div", { class: "widget-form look-knobs" }, labelled("Layer", layer, outs.layer), labelled("Head", head, outs.head), labelled("Who looks", place, outs.place), looks)),
        el("h4", {}, engine ? "The next byte; press one to add it" : "The next byte"),
        el("div", { class: "look-both" }, bars,
            el("div", { class: "widget-form look-knobs" }, labelled("Temperature", temperature, outs.temperature), labelled("top-p", topP, outs.top_p), verdict)));
    draw();
    return box;
});
