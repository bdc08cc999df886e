/* Which settings a platform moves. The document is that of course/site/widgets/platform_defaults.py:
 * every value is one that the pinned release's own configuration took on. */
"use strict";

/** The settings of a combination that are not those of another: names, in the table's order. */
CourseWidgets.formulas.platformMoves = (data, now, before) => {
    const at = (picked) => data.table[[picked.platform, picked.use, picked.flag].join("|")];
    return Object.keys(at(now)).filter((name) => at(now)[name] !== at(before)[name]);
};

CourseWidgets.mount("platform-defaults", (data) => {
    const { el, labelled, formulas } = CourseWidgets;
    const { ask, keepKeys } = CourseDecide;
    const box = el("section", { class: "widget-box decide", "aria-label": "The settings of a platform" });
    const LISTS = {
        platform: ["Platform", data.platforms], use: ["Use", data.uses.map((name) => [name, name])],
        flag: ["Flag", data.flags.map((name) => [name, name])],
    };
    const fields = Object.fromEntries(Object.entries(LISTS).map(([key, [, values]]) => [key,
        el("select", { "data-input": key, onchange: () => show() }, values.map(([value, text]) => el("option", { value }, text)))]));
    const said = el("p", { class: "film-say", "aria-live": "polite" });
    const list = el("ul", { class: "choice-list" });
    let before = null;

    const picked = () => Object.fromEntries(Object.entries(fields).map(([key, field]) => [key, field.value]));
    function set(to) {
        for (const [key, value] of Object.entries(to)) fields[key].value = value;
        before = null;
        show();
    }

    function show() {
        const now = picked(), values = data.table[[now.platform, now.use, now.flag].join("|")];
        const moved = before ? formulas.platformMoves(data, now, before) : [];
        said.textContent = !before ? "Change one of the three: what moves is marked."
            : moved.length ? `Moved: ${moved.join(", ")}.` : "Nothing moves.";
        said.dataset.moved = moved.join(" ");
        list.replaceChildren(...Object.entries(values).map(([name, value]) => el("li", { class: moved.includes(name) ? "choice-ok" : "choice-taken", "data-setting": name },
            el("code", {}, name), el("span", {}, moved.includes(name) ? el("mark", {}, value) : value))));
        before = now;
    }

    keepKeys(box);
    box.append(ask(data.questions, (posed) => set(posed.picked)),
        el("div", { class: "widget-form choice-form" }, Object.entries(fields).map(([key, field]) => labelled(LISTS[key][0], field))),
        said, list);
    set(data.start);
    return box;
});
