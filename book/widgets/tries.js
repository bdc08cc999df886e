/* Your tries at challenges, plotted: on the page of challenges, from this browser and the checkout that serves it.
 *
 * A dot is a try, in its order; a filled one beat all before it. Lines are the marks. Nothing is drawn, and nothing stands
 * there, for who tried nothing.
 */
"use strict";

(() => {
    const box = document.querySelector(".tries");
    if (!box || typeof CourseStore === "undefined") return;
    const challenges = JSON.parse(box.querySelector("script").textContent);
    const HEIGHT = 210, LEFT = 8, RIGHT = 120, TOP = 12, BOTTOM = 46;
    const SVG = "http://www.w3.org/2000/svg";
    let served = {}; // what the checkout knows, under `course book serve`

    const make = (tag, attributes = {}, ...children) => {
        const node = document.createElement(tag);
        for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
        node.append(...children);
        return node;
    };
    const draw = (tag, attributes, text = "") => {
        const node = document.createElementNS(SVG, tag);
        for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
        if (text) node.textContent = text;
        return node;
    };
    const number = (value) => value.toLocaleString("en-US");

    function plot({ title, unit, fewer, marks }, tries) {
        const scored = tries.filter((each) => !each.why);
        const values = [...scored.map((each) => each.score), ...marks.map(([, score]) => score)];
        const least = Math.min(...values), most = Math.max(...values);
        const spread = most - least || 1;
        const WIDTH = Math.min(640, Math.max(280, box.clientWidth || 640)); // a letter is as large on a phone
        const y = (score) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (score - least) / spread);
        const x = (place) => LEFT + 12 + (WIDTH - LEFT - RIGHT - 24) * (tries.length > 1 ? place / (tries.length - 1) : 0.5);
        const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label":
            `${title}: ${tries.length} tries, ${scored.map((each) => number(each.score)).join(", ")} ${unit}` });
        let above = -20;
        for (const [name, score] of [...marks].sort((a, b) => b[1] - a[1])) {
            svg.append(draw("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(score), y2: y(score), class: "tries-mark" }));
            above = Math.max(y(score) + 4, above + 15); // marks that lie close do not cover each other's words
            svg.append(draw("text", { x: WIDTH - RIGHT + 6, y: above }, `${name} ${number(score)}`));
        }
        tries.forEach((each, place) => {
            if (each.why) svg.append(draw("text", { x: x(place) - 4, y: HEIGHT - BOTTOM + 20, class: "tries-none" }, "x"));
            else svg.append(draw("circle", { cx: x(place), cy: y(each.score), r: 5, class: `tries-${each.outcome}` }));
        });
        svg.append(draw("text", { x: LEFT, y: HEIGHT - 6 }, `${unit}: ${fewer ? "fewer are" : "more are"} better`));
        return svg;
    }

    function table(tries) {
        const head = ["", "score", "marks", "", "idea"].map((name) => make("th", {}, name));
        const rows = tries.map((each, place) => make("tr", {}, ...[String(place + 1), each.why ? "nothing" : number(each.score),
            each.marks.join(", "), each.why ? each.why.split("\n")[0] : each.outcome, each.note].map((cell) => make("td", {}, cell))));
        return make("div", { class: "line-scroll", tabindex: "0", role: "region", "aria-label": "Tries" },
            make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
    }

    function show() {
        box.hidden = false; // before it is measured
        const kept = CourseStore.tries();
        const parts = challenges.flatMap((challenge) => {
            const known = new Map([...(kept[challenge.name] ?? []), ...(served[challenge.name]?.tries ?? [])].map((each) =>
                [`${Date.parse(each.when)} ${each.digest}`, each]));
            const tries = [...known.values()].sort((a, b) => Date.parse(a.when) - Date.parse(b.when));
            if (!tries.length) return [];
            return [make("h3", { id: `tries-${challenge.name}` }, `${challenge.name}: ${challenge.title}`), plot(challenge, tries),
                make("details", {}, make("summary", {}, `${tries.length} ${tries.length === 1 ? "try" : "tries"}, with their ideas`), table(tries))];
        });
        const chosen = make("input", { type: "file", accept: ".json,application/json", hidden: "" });
        const said = make("p", { role: "status" });
        const button = make("button", { type: "button" }, "Import");
        button.addEventListener("click", () => chosen.click());
        chosen.addEventListener("change", async () => {
            try {
                CourseStore.imported(await chosen.files[0].text());
                show();
            } catch (error) {
                said.textContent = `Nothing was taken: ${error.message}.`;
            }
        });
        const how = parts.length ? "A filled dot beat every try before it, an x scored nothing. "
            : "Your tries are plotted here once this browser has them. ";
        box.replaceChildren(...parts, make("p", {}, how, "They come from a checkout: ", make("code", {}, "course export FILE"), ", then ",
            button, chosen, "."), said);
    }

    show();
    (async () => {
        try {
            const answer = await CourseStore.local("tries");
            if (!answer?.ok) return;
            served = (await answer.json()).tries;
            show();
        } catch {
            // what this browser keeps is there
        }
    })();
})();
