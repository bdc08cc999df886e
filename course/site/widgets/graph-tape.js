/* A captured graph whose input the reader replaces or copies into. The document is that of
 * course/site/widgets/graph_tape.py. */
"use strict";

/** The same as `play` there: the state at the beginning and after each action. */
CourseWidgets.formulas.graphTape = (start, actions) => {
    const kernels = (value) => (value + 1) * 2 - 3;
    const arrays = { ...start };
    const out = { value: 0 };
    let x = "A";
    let kept = null;
    return [["begin"], ...actions].map(([kind, name, value]) => {
        if (kind === "write") arrays[name] = value;
        else if (kind === "point") x = name;
        else if (kind === "copy") arrays.A = arrays[name];
        else if (kind === "replay") out.value = kernels(arrays.A);
        else if (kind === "keep") kept = out;
        else if (kind === "keep copy") kept = { ...out };
        return { arrays: { ...arrays }, x, out: out.value, eager: kernels(arrays[x]), kept: kept && kept.value };
    });
};

CourseWidgets.mount("graph-tape", (data) => {
    const { el, svg, formulas } = CourseWidgets;
    const { ask, keepKeys } = CourseDecide;
    const box = el("section", { class: "widget-box decide", "aria-label": "A graph and its pointers" });
    let actions = [];
    const act = (...action) => { actions.push(action); show(); };
    const button = (words, ...action) => el("button", { type: "button", "data-action": action.join(" "), onclick: () => act(...action) }, words);
    const sliders = {};
    const values = {};
    for (const name of ["A", "B"]) {
        values[name] = el("output", {});
        sliders[name] = el("input", { type: "range", min: 0, max: 100, step: 1, "data-input": name, "aria-label": `Value in ${name}`,
            oninput: () => { if (actions.at(-1)?.[0] === "write" && actions.at(-1)[1] === name) actions.pop(); act("write", name, Number(sliders[name].value)); } });
    }
    const point = (name) => el("button", { type: "button", "data-action": `point ${name}`, onclick: () => act("point", name) }, `x → ${name}`);
    const points = { A: point("A"), B: point("B") };
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const plot = svg("svg", { viewBox: "0 0 400 190", class: "decide-plot tape-plot", role: "img" });

    function draw(now) {
        const cell = (x, y, name, value, css) => [svg("rect", { x, y, width: 74, height: 40, rx: 4, class: css }),
            svg("text", { x: x + 6, y: y + 14, class: "tape-name" }, name),
            svg("text", { x: x + 37, y: y + 32, "text-anchor": "middle", class: "tape-value" }, value)];
        const ROW = { A: 28, B: 92 };
        const from = ROW[now.x] + 20;
        const parts = [svg("title", {}, `x points to ${now.x}; the graph reads A, ${now.arrays.A}; out holds ${now.out}`),
            svg("text", { x: 0, y: 14 }, "name"), svg("text", { x: 88, y: 14 }, "memory"), svg("text", { x: 262, y: 14 }, "captured graph"),
            svg("text", { x: 14, y: 82, class: "tape-value" }, "x"),
            svg("path", { d: `M28 77C50 77 55 ${from} 82 ${from}`, class: "tape-pointer" }),
            svg("path", { d: `M82 ${from - 5}L90 ${from}L82 ${from + 5}Z`, class: "tape-pointer-head" }),
            ...cell(92, ROW.A, "A", `${now.arrays.A}`, "tape-frozen"), ...cell(92, ROW.B, "B", `${now.arrays.B}`, "tape-free"),
            svg("rect", { x: 256, y: 22, width: 140, height: 112, rx: 6, class: "tape-graph" }),
            svg("path", { d: `M256 48H176`, class: "tape-read" }), svg("path", { d: "M176 43L168 48L176 53Z", class: "tape-read-head" }),
            svg("text", { x: 180, y: 40 }, "reads A"),
            ...data.ops.map((op, i) => [svg("rect", { x: 268, y: 32 + 33 * i, width: 116, height: 27, rx: 4, class: "tape-kernel" }),
                svg("text", { x: 326, y: 50 + 33 * i, "text-anchor": "middle" }, `${op}${i ? "" : "  of A"}`)]).flat(),
            svg("path", { d: "M326 134V144", class: "tape-read" }),
            ...cell(289, 146, "out", `${now.out}`, "tape-frozen"),
            ...(now.kept === null ? [] : cell(92, 146, "kept", `${now.kept}`, "tape-free"))];
        plot.replaceChildren(...parts);
    }

    function show() {
        const states = formulas.graphTape(data.start, actions);
        const now = states.at(-1);
        const before = states.at(-2);
        for (const name of ["A", "B"]) {
            sliders[name].value = now.arrays[name];
            values[name].textContent = now.arrays[name];
            points[name].setAttribute("aria-pressed", now.x === name);
        }
        draw(now);
        const kind = actions.at(-1)?.[0];
        const stale = now.out !== now.eager;
        said.textContent = {
            write: "The value changed. The graph has not run.",
            point: `The name x is bound to ${now.x}. The graph does not know names: it still reads A.`,
            copy: "B's value lies in A now: the engine's way.",
            replay: `Replayed: out is ${now.out}. ${stale ? `On x, ${now.arrays[now.x]}, eager would give ${now.eager}: the graph read A, ${now.arrays.A}. No error.` : "Eager gives the same."}`,
            keep: "kept is a second name for out's memory.",
            "keep copy": "kept is a copy: it stays.",
        }[kind] || "Captured with x pointing to A. Recording ran nothing: out holds 0.";
        if (kind === "replay" && before.kept !== null && before.kept !== now.kept) said.textContent += ` kept was ${before.kept}, and changed with it.`;
        for (const key of ["out", "eager", "kept", "x"]) said.dataset[key] = now[key];
    }

    keepKeys(box);
    const reset = el("button", { type: "button", onclick: () => { actions = []; show(); } }, "Begin again");
    box.append(ask(data.questions, (posed) => { actions = posed.actions.map((each) => [...each]); show(); }),
        plot,
        el("div", { class: "widget-form" }, ["A", "B"].map((name) => el("label", { class: "widget-field" },
            el("span", {}, `Value in ${name}: `, values[name]), sliders[name]))),
        el("p", { class: "decide-choices", role: "group", "aria-label": "Where x points, and what is done" }, points.A, points.B,
            button("Copy B into A", "copy", "B"), button("Replay", "replay"), button("Keep out", "keep"), button("Keep a copy of out", "keep copy"), reset),
        said);
    show();
    return box;
});
