/* Launches and kernels of one step. The document is that of course/site/widgets/cuda_graphs.py. */
"use strict";

/** The same recurrence as mini_vllm/launches.py `simulate`. */
CourseWidgets.formulas.launches = (kernels, mode, launchUs, kernelUs) => {
    const groups = [];
    for (const name of kernels) {
        const last = groups[groups.length - 1];
        const joins = last && (mode === "full"
            || (mode === "piecewise" && (name === "attention") === (last[0] === "attention")));
        if (joins) last.push(name);
        else groups.push([name]);
    }
    const launches = [];
    const ran = [];
    let issued = 0;
    let ended = 0;
    for (const group of groups) {
        const name = group.length === 1 ? group[0] : `graph of ${group.length}`;
        launches.push({ name, start: issued, end: issued + launchUs });
        issued += launchUs;
        for (const kernel of group) {
            const start = Math.max(issued, ended);
            ended = start + kernelUs;
            ran.push({ name: kernel, start, end: ended });
        }
    }
    const busy = ran.reduce((sum, kernel) => sum + kernel.end - kernel.start, 0);
    return { launches, kernels: ran, step_us: ended, gpu_busy: busy / ended };
};

CourseWidgets.mount("cuda-graphs", (data) => {
    const { el, svg, labelled, formulas, room } = CourseWidgets;
    const box = el("section", { class: "widget-box", "aria-label": "CUDA graph timeline" });
    const range = (id, min, max, step, value) => {
        const field = el("input", { type: "range", min, max, step, value, oninput: update });
        field.dataset.input = id;
        return field;
    };
    const layers = range("layers", 1, 6, 1, data.defaults.layers);
    const launch = range("launch_us", 1, 10, 0.5, data.defaults.launch_us);
    const kernel = range("kernel_us", 0.5, 20, 0.5, data.defaults.kernel_us);
    const texts = { layers: el("output"), launch: el("output"), kernel: el("output") };
    const verdict = el("p", { class: "film-say", "aria-live": "polite" });
    const R = 8, ROW = 22, GAP = 26;
    const wide = room(640, () => update());
    const plot = svg("svg", { role: "img", class: "roof-plot" });
    const table = el("table", { class: "lane-table" }, el("thead", {}, el("tr", {},
        ["mode", "launches", "step", "GPU busy", "faster"].map((name) => el("th", { scope: "col" }, name)))));
    const body = el("tbody");
    table.append(body);

    function update() {
        const W = wide();
        const L = W < 500 ? 44 : 84;
        plot.setAttribute("viewBox", `0 0 ${W} ${3 * (2 * ROW + GAP) + 24}`);
        const count = Number(layers.value);
        const launchUs = Number(launch.value);
        const kernelUs = Number(kernel.value);
        texts.layers.textContent = `${count} × ${data.layer.length} kernels`;
        texts.launch.textContent = `${launchUs} µs`;
        texts.kernel.textContent = `${kernelUs} µs`;
        const kernels = Array.from({ length: count }, () => data.layer).flat();
        const lines = data.modes.map((mode) => [mode, formulas.launches(kernels, mode, launchUs, kernelUs)]);
        const latest = Math.max(...lines.map(([, line]) => Math.max(line.step_us, line.launches.at(-1).end)));
        // One scale for many settings, so that a bar grows when a slider does: the next of 50, 100, 200, 400...
        const longest = 50 * 2 ** Math.max(0, Math.ceil(Math.log2(latest / 50)));
        const x = (us) => L + ((W - L - R) * us) / longest;
        const parts = [svg("title", {}, "Host launches and GPU kernels in three modes")];
        lines.forEach(([mode, line], i) => {
            const top = i * (2 * ROW + GAP) + 20;
            parts.push(svg("text", { x: 0, y: top - 6, class: "lane-mode" }, mode));
            for (const [j, lane, spans] of [[0, "host", line.launches], [1, "GPU", line.kernels]]) {
                const y = top + j * ROW;
                parts.push(svg("text", { x: L - 8, y: y + 14, "text-anchor": "end" }, lane));
                for (const span of spans) {
                    const css = j === 0 ? "lane-launch" : span.name === "attention" ? "lane-attention" : "lane-kernel";
                    parts.push(svg("rect", {
                        x: x(span.start), y: y + 2, width: Math.max(0.6, x(span.end) - x(span.start) - 0.6),
                        height: ROW - 5, class: css,
                    }, svg("title", {}, `${span.name}: ${span.start.toFixed(1)} to ${span.end.toFixed(1)} µs`)));
                }
            }
        });
        parts.push(svg("text", { x: W - R, y: 3 * (2 * ROW + GAP) + 20, "text-anchor": "end" }, `${longest.toFixed(0)} µs`),
            svg("text", { x: L, y: 3 * (2 * ROW + GAP) + 20 }, "0"));
        plot.replaceChildren(...parts);
        const eager = lines[0][1].step_us;
        body.replaceChildren(...lines.map(([mode, line]) => el("tr", { "data-mode": mode },
            el("th", { scope: "row" }, mode),
            el("td", { "data-result": "launches", "data-value": line.launches.length }, `${line.launches.length}`),
            el("td", { "data-result": "step_us", "data-value": line.step_us }, `${line.step_us.toFixed(1)} µs`),
            el("td", { "data-result": "gpu_busy", "data-value": line.gpu_busy }, `${(100 * line.gpu_busy).toFixed(0)} %`),
            el("td", {}, `${(eager / line.step_us).toFixed(2)}×`))));
        verdict.textContent = kernelUs < launchUs
            ? "A kernel is shorter than a launch: in eager mode the GPU waits for the host, and a graph pays."
            : "A kernel takes at least as long as a launch: the host runs ahead of the GPU, and a graph gains next to nothing.";
    }

    const legend = el("p", { class: "widget-legend" }, [["lane-launch", "launch"], ["lane-kernel", "kernel"],
        ["lane-attention", "attention"]].map(([css, words]) =>
        el("span", {}, el("i", { class: css, "aria-hidden": "true" }), words)));
    box.append(el("div", { class: "widget-form" }, labelled("Layers", layers, texts.layers),
        labelled("One launch", launch, texts.launch), labelled("One kernel", kernel, texts.kernel)),
    verdict, plot, legend, el("div", { class: "line-scroll", tabindex: "0", role: "region",
        "aria-label": "The three modes in numbers" }, table));
    update();
    return box;
});
