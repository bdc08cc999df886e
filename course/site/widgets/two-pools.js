/* Six prompts through two servers, with a wire between them or without. The document is that of
 * course/site/widgets/two_pools.py: every time is a plan of the engine's scheduler on a computed clock. */
"use strict";

CourseWidgets.mount("two-pools", (data) => {
    const { el, svg, labelled, choice, questions } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "Two pools and the wire between them" });
    const named = (id, field) => { field.dataset.input = id; return field; };
    const words = (arm) => (/^\d+$/.test(arm) ? `1P1D, ${arm} Gb/s` : arm);
    const arms = Object.fromEntries(data.arms.map((arm) => [words(arm), arm]));
    const arm = named("arm", choice(Object.keys(arms), words("200"), () => update()));
    const prompt = named("prompt", choice(data.prompts.map(String), "2048", () => update()));
    const every = named("every", choice(data.every.map(String), "60", () => update()));
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const plot = svg("svg", { role: "img", class: "roof-plot slots-plot" });
    const ms = (tenths) => `${(tenths / 10).toFixed(1)} ms`;
    const KINDS = { prefill: ["slots-A", "prefill"], wire: ["slots-B", "on the wire"], decode: ["slots-C", "decode"] };

    function update() {
        const film = data.films[`${prompt.value}|${every.value}|${arms[arm.value]}`];
        const LINE = 26, L = 26, W = 440;
        const last = Math.max(...film.rows.map((row) => row.decode[1]));
        const x = (tenths) => L + (W - L) * tenths / last;
        const parts = film.rows.flatMap((row, place) => {
            const y = 4 + LINE * place;
            const bars = Object.entries(KINDS).filter(([kind]) => row[kind]).map(([kind, [css, says]]) => svg("rect", {
                x: x(row[kind][0]), y, width: Math.max(0.8, x(row[kind][1]) - x(row[kind][0])), height: LINE - 8,
                class: css, "fill-opacity": 0.75, "data-kind": kind,
            }, svg("title", {}, `prompt ${place + 1}, ${says}: ${ms(row[kind][0])} to ${ms(row[kind][1])}`)));
            return [svg("text", { x: L - 6, y: y + 14, "text-anchor": "end" }, place + 1),
                svg("line", { x1: x(row.arrival), x2: x(row.arrival), y1: y - 2, y2: y + LINE - 6, class: "roof-line" }), ...bars];
        });
        const end = LINE * film.rows.length + 18;
        parts.push(svg("text", { x: L, y: end }, "0"), svg("text", { x: W, y: end, "text-anchor": "end" }, ms(last)));
        plot.setAttribute("viewBox", `0 0 ${W + 2} ${end + 4}`);
        plot.replaceChildren(svg("title", {}, "One row a prompt, time to the right"), ...parts);
        verdict.textContent = `Longest time to first token ${ms(film.ttft)}; longest gap between two tokens ${ms(film.gap)}. `
            + `A prompt is ${data.mebibytes[prompt.value]} MiB of K and V.`;
        verdict.dataset.ttft = film.ttft;
        verdict.dataset.gap = film.gap;
    }

    const posed = questions(data.questions, "Run it", (question) => {
        arm.value = words(question.arm);
        prompt.value = String(question.prompt);
        every.value = String(question.every);
        update();
    });

    // mdBook turns pages with the arrow keys; inside a widget they move the widget.
    box.addEventListener("keydown", (event) => {
        if (event.key.startsWith("Arrow")) event.stopPropagation();
    });
    box.append(
        ...posed,
        el("div", { class: "widget-form" }, labelled("Two GPUs as", arm), labelled("Tokens of a prompt", prompt), labelled("One every, ms", every)),
        plot,
        el("p", { class: "widget-legend" }, "First colour: prefill; second: on the wire, one prompt at a time; third: decode. A line: it arrives. What is between is waiting."),
        verdict);
    update();
    return box;
});
