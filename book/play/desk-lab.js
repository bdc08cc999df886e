/* The desk of a lab: an editor with starter.py, the tests, what is kept, and the file on disk where there is one. */
"use strict";

CourseDesk.lab = (host) => {
    const { el, button } = CourseDesk;
    const lab = host.dataset.lab;
    const served = CourseDesk.isServed();
    const native = window.COURSE_PLAY?.labs?.[lab]?.native;
    const TIME_LIMIT = 120; // seconds; the worker takes up to ten times what the machine itself takes
    const REVIEW_AFTER = 14 * 24 * 3600 * 1000; // milliseconds, as in course/learning/hunts.py
    let opening = null;

    if (!served && (native || !window.COURSE_PLAY?.labs?.[lab])) {
        host.append(el("p", { class: "desk-cannot" },
            `This lab does not run in a page${typeof native === "string" ? `: ${native}` : ""}. On your machine: `,
            el("code", {}, `course check ${lab}`)));
        return;
    }

    // ------------------------------------------------------------ the way to it

    const heading = el("h2", { id: "desk", class: "desk-title", tabindex: "-1" }, "Do it here");
    const room = el("div", { class: "desk-room" }, el("p", {}, "Loading the editor ..."));
    const beside = button("Beside the text", () => setBeside(!host.classList.contains("desk-beside")),
        { class: "desk-wide", "aria-pressed": "false" });
    const opener = button("Open the lab", () => go(), { class: "desk-opener" });
    host.setAttribute("role", "region");
    host.setAttribute("aria-label", `Lab ${lab}, to be done here`);
    host.append(el("div", { class: "desk-head" }, heading, beside), room);
    document.body.append(opener);
    const near = new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && open(),
        { rootMargin: "600px" });
    near.observe(host);
    new IntersectionObserver((seen) => void (opener.hidden = seen[seen.length - 1].isIntersecting)).observe(host);

    function open() {
        near.disconnect();
        opening ??= begin().catch((error) => room.replaceChildren(
            el("p", { role: "alert" }, `The lab could not be loaded (${error.message}). Reload the page.`)));
        return opening;
    }

    async function go() {
        await open();
        if (matchMedia("(min-width: 1200px)").matches) setBeside(true);
        host.scrollIntoView({ block: "start" });
        heading.focus({ preventScroll: true });
    }

    /** On a wide screen the desk may stand beside the text; the list of pages makes room for it. */
    function setBeside(on) {
        const sidebar = document.getElementById("mdbook-sidebar-toggle-anchor");
        if (on && sidebar?.checked && innerWidth < 1700) sidebar.click();
        host.classList.toggle("desk-beside", on);
        document.documentElement.classList.toggle("desk-is-beside", on);
        beside.setAttribute("aria-pressed", on);
        beside.textContent = on ? "Below the text" : "Beside the text";
        window.dispatchEvent(new Event("resize")); // other boxes of code scroll now
    }

    // ------------------------------------------------------------ the desk itself

    async function begin() {
        const data = await json(await fetch(host.dataset.desk));
        const file = served ? await json(await CourseStore.local(`lab?id=${lab}`)) : null;
        const edit = CourseStore.edit(lab);
        const from = CourseDesk.mark(data.starter);
        const notices = el("div", { class: "desk-notices", role: "status" });
        const place = el("div", { class: "desk-editor" });
        const brought = file?.digest ? file.text : undefined; // no digest: there is no file
        let base = file?.digest;
        let seen = brought; // the file's text that the editor was given, or that Run has saved
        let stop = null; // ends the run, while there is one
        let timer = 0;
        let editor = null;
        let followed = null; // the notice that the file was followed
        let unkept = null; // the notice of what could not be kept

        const run = button("Run the tests", () => grade(), { class: "desk-run" });
        const end = button("Stop", () => stop?.(), { hidden: true });
        const reset = button("Reset", () => putBack());
        const chosen = el("input", { type: "file", accept: ".json,application/json", hidden: true, onchange: take });
        const address = el("p", { class: "desk-link", role: "status" });
        const shelf = el("ul", { class: "desk-older" });
        const more = el("details", { class: "desk-more" }, el("summary", {}, "Keep or move your work"),
            el("p", {}, served ? "Run saves the file on your machine. " : "Your text is kept in this browser. ",
                "An exported file holds everything you did in these pages; another browser takes it by Import, a "
                + "checkout by ", el("code", {}, "course import FILE"), "."),
            el("p", { class: "desk-bar" }, button("Export", give), button("Import", () => chosen.click()), chosen,
                button("Link to this text", link)),
            address,
            el("p", {}, "Earlier texts of this lab: "), shelf);
        more.addEventListener("toggle", () => more.open && listOlder());
        const here = CourseDesk.canRun() && !native ? CoursePlay.session() : null; // it loads nothing before it is called
        const session = served ? null : here; // this lab's own tests: the checkout runs them
        host.addEventListener("focusin", () => session?.ready(), { once: true }); // whoever opens it will run it
        const loading = session ? CourseDesk.loading(session) : null;
        const predict = Object.keys(data.predictions).length ? CourseDesk.predict({ data, file }) : null;
        const results = CourseDesk.results({
            data, predicted: predict?.told, goTo: (line) => editor.goTo(line), text: () => editor.get(),
            solution: async () => (await json(await fetch(host.dataset.solution))).text,
        });
        let asked = null; // what the fold "Ask vLLM" holds, once it was opened
        let failed = "";
        const offer = () => asked?.then((it) => it.offer(failed));
        const vllm = data.vllm && here ? el("details", { ontoggle: () => {
            asked ??= CourseDesk.load(new URL(data.vllm.script, new URL(host.dataset.desk, document.baseURI)).href).then(() =>
                CourseDesk.real({ box: vllm, lab, workload: data.vllm.workload, session: here, text: () => editor.get() }));
            offer();
        } }, el("summary", {}, "Ask vLLM: its own scheduler beside yours")) : "";
        let hunting = null; // what the fold "Hunt" holds, once it was opened
        const hunt = data.hunt && here ? el("details", { class: "desk-hunt", ontoggle: () => {
            hunting ??= CourseDesk.load(new URL(data.hunt, new URL(host.dataset.desk, document.baseURI)).href).then(() =>
                CourseDesk.hunt({ box: hunt, lab, skip: window.COURSE_PLAY.labs[lab].skip ?? {}, session: here }));
        } }, el("summary", {}, "Hunt: the reference with one wrong line"))
            : data.hunt ? el("p", {}, "The reference with one wrong line, to be mended: ", el("code", {}, `course hunt ${lab}`)) : "";
        const plain = served && !window.COURSE_PLAY?.editor
            ? ["For colours and line numbers here: ", el("code", {}, "course book runtime"), ", once. "] : [];
        const where = served ? ["This is ", el("code", {}, data.file), " of your checkout. ", ...plain]
            : [el("code", {}, "starter.py"), ", kept in this browser. "];
        room.replaceChildren(
            el("p", {}, "Write what is missing, run the tests, mend the first that fails. ", where),
            notices, predict?.box ?? "", place,
            el("div", { class: "desk-bar desk-actions" }, run, end, reset,
                el("span", { class: "desk-keys" }, "Ctrl-Enter runs. Escape, then Tab, leaves the editor.")),
            loading?.box ?? "", results.box, vllm, hunt, more);
        editor = await CourseDesk.editor(place, {
            doc: brought ?? edit?.text ?? data.starter, onChange: changed, label: `starter.py of lab ${lab}`,
        });
        CourseDesk.runsByKey(host, grade);
        greet();
        if (served) {
            const look = () => !document.hidden && !stop && follow().catch(() => {}); // Run says what is wrong
            setInterval(look, 2000);
            window.addEventListener("focus", look);
        }

        // -------------------------------------------------------- what is said above the editor

        /** A line with buttons; each of them takes the line away. The line. */
        function notice(text, ...actions) {
            const line = el("div", { class: "desk-notice" }, el("span", {}, text));
            for (const [label, act] of actions) {
                line.append(button(label, () => {
                    line.remove();
                    act();
                }));
            }
            notices.append(line);
            return line;
        }

        function greet() {
            if (CourseStore.notice()) notice(CourseStore.notice());
            if (file && !file.digest) notice("There is no starter.py on your machine: Run writes this text there.");
            linked();
            const day = edit ? new Date(edit.at).toLocaleString() : "";
            if (edit?.from && edit.from !== from) {
                notice("The starter of this lab has changed since you began. Your text is as it was; Reset takes "
                    + "the new starter.", ["I know", () => save()]);
            }
            if (brought !== undefined && edit && edit.text !== brought && edit.text !== data.starter) {
                notice(`This browser holds another text of this lab, of ${day}.`, ["Show that one", () => show(edit.text)],
                    ["Forget it", () => CourseStore.dropEdit(lab)]);
            }
            const result = CourseStore.result(lab);
            const last = Math.max(Date.parse(result?.at ?? 0) || 0, Date.parse(CourseStore.hunt(lab)?.found || 0) || 0);
            if (hunt.open === false && result?.ok && Date.now() - last >= REVIEW_AFTER && CourseStore.hunt(lab)?.found !== "") {
                notice("You passed this lab a while ago. Here it is with one line wrong.", ["Hunt", () => {
                    hunt.open = true;
                    hunt.scrollIntoView({ block: "start" });
                }]);
            }
            if (result && !served) {
                notice(result.ok ? `Passed when it was last run here: all ${result.total} tests.`
                    : `When it was last run here, ${result.passed} of ${result.total} tests passed.`);
            }
        }

        // -------------------------------------------------------- keeping

        function changed() {
            session?.ready();
            clearTimeout(timer);
            timer = setTimeout(save, 400);
        }
        function save() {
            clearTimeout(timer);
            timer = 0;
            if (editor.get() === data.starter && !CourseStore.edit(lab)) return;
            keep(() => CourseStore.saveEdit(lab, editor.get(), from));
        }
        /** Have the store keep something. What it cannot keep stays in the editor, and the reader hears of it once. */
        function keep(act) {
            const before = CourseStore.notice();
            let told = "";
            try {
                act();
                told = CourseStore.notice() === before ? "" : CourseStore.notice();
            } catch (error) {
                told = `Not kept in this browser: ${error.message}. The editor has all of it, and Run takes it; copy it `
                    + "elsewhere before you leave, or make it shorter.";
            }
            if (told !== unkept?.firstChild.textContent) unkept?.remove();
            if (told && !unkept?.isConnected) unkept = notice(told);
        }
        window.addEventListener("pagehide", () => timer && save());
        CourseStore.onchange(({ elsewhere }) => {
            const other = elsewhere ? CourseStore.edit(lab) : null;
            if (!other || other.text === editor.get()) return;
            keep(() => CourseStore.keepOlder(lab, other.text));
            notices.replaceChildren();
            notice("Another tab has another text of this lab.", ["Show that one", () => show(other.text)]);
        });

        /** Put a text into the editor; the one that was there is kept. */
        function show(text) {
            const mine = editor.get();
            keep(() => CourseStore.keepOlder(lab, mine));
            if (unkept?.isConnected) notice("The text that was here can be had back.", ["Put it back", () => show(mine)]);
            editor.set(text);
            save();
        }
        function putBack() {
            const mine = editor.get();
            notices.replaceChildren();
            if (mine === data.starter) return notice("This is the starter as it was given.");
            keep(() => CourseStore.saveEdit(lab, mine, from));
            CourseStore.dropEdit(lab);
            clearTimeout(timer);
            editor.set(data.starter);
            notice("The starter as it was given.", ["Put my text back", () => show(mine)]);
        }
        /** The texts that gave way to others, newest first, each with a button that brings it back. */
        function listOlder() {
            const texts = CourseStore.older(lab).filter((each) => each.text !== editor.get());
            shelf.replaceChildren(...texts.map((each) => el("li", {},
                `${new Date(each.at).toLocaleString()}, ${each.text.split("\n").length} lines `,
                button("Show this one", () => (show(each.text), listOlder())))));
            if (!texts.length) shelf.append(el("li", {}, "none yet"));
        }
        function give() {
            save();
            const address = URL.createObjectURL(new Blob([CourseStore.exported()], { type: "application/json" }));
            el("a", { href: address, download: "course-progress.json" }).click();
            setTimeout(() => URL.revokeObjectURL(address), 60_000);
        }
        /** An address that holds the text in its fragment, which a browser sends nowhere. */
        async function link() {
            const text = editor.get();
            const field = el("input", { type: "text", readonly: true, "aria-label": "Link to this text" });
            try {
                field.value = `${location.href.split("#")[0]}#${CourseShare.NAME}=${await CourseShare.packed(text)}`;
            } catch (error) {
                return address.replaceChildren(`No link was made: ${error.message}.`);
            }
            let how = "Copy it from here. ";
            try {
                await navigator.clipboard.writeText(field.value);
                how = "Copied. ";
            } catch { /* the field has it */ }
            address.replaceChildren(`${how}The address itself holds the text, ${field.value.length} characters; nothing is sent anywhere. `,
                field);
            field.select();
        }
        /** Offer the text that the page's address holds; nothing of it is taken, or run, before that is asked for. */
        async function linked() {
            const given = CourseShare.given(location.hash);
            if (given === null) return;
            try {
                const text = await CourseShare.unpacked(given);
                if (text === editor.get()) return;
                notice(`The link holds a text of this lab, ${text.split("\n").length} lines, written by whoever made it. `
                    + "Read it before you run it.", ["Show it", () => show(text)]);
            } catch (error) {
                notice(`The link's text cannot be read: ${error.message}.`);
            }
        }
        window.addEventListener("hashchange", linked);
        async function take() {
            const mine = CourseStore.edit(lab)?.text;
            try {
                const taken = CourseStore.imported(await chosen.files[0].text());
                const theirs = CourseStore.edit(lab)?.text;
                if (theirs !== mine) show(theirs);
                const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
                notice(`Taken: ${counted(taken.edits, "edit")}, ${counted(taken.results, "result")}, `
                    + `${counted(taken.answers, "answer")}, ${counted(taken.predictions, "prediction")}, `
                    + `${counted(taken.hunts, "hunt")}, tries at ${counted(taken.tries, "challenge")}, ${counted(taken.incidents, "incident")}.`);
            } catch (error) {
                notice(`Nothing was taken: ${error.message}.`);
            }
            chosen.value = "";
        }

        // -------------------------------------------------------- running

        async function grade() {
            if (stop) return;
            let began = 0; // when the first test was heard of: what loads before is not the reader's
            const report = CourseReport.begun();
            notices.replaceChildren();
            results.begin();
            predict?.begin();
            save();
            busy(true);
            const hear = (event) => {
                began ||= performance.now();
                loading?.hide();
                CourseReport.heard(report, event);
                results.heard(event, report);
            };
            let words = "";
            try {
                if (served) words = await onDisk(report, hear);
                else await inPage(report, hear);
            } catch (error) {
                const during = report.reading ? " at import: the file itself was being read" : report.running ? ` in ${CourseReport.nameOf(report.running)}` : "";
                report.trouble = ["stopped", "AbortError"].some((name) => [error.message, error.name].includes(name))
                    ? `Stopped${during}.` : late(error.message);
            }
            busy(false);
            loading?.hide();
            if (words === null) return results.rest("Not run: the file on your machine has changed; see above the editor.");
            predict?.ended(CourseReport.measured(report));
            results.end(report, began && (performance.now() - began) / 1000, words);
            failed = CourseReport.failed(report)[0]?.message ?? "";
            offer();
            remember(report);
        }
        const late = (message) => (message.startsWith("out of time")
            ? `${message}.\nLook for a loop that never ends: a condition that never becomes false, or a queue that is `
                + "never emptied." : message);

        function busy(on) {
            run.disabled = on;
            end.hidden = !on;
            if (!on) stop = null;
        }
        function remember(report) {
            const good = CourseReport.passed(report).length;
            const total = good + CourseReport.failed(report).length;
            if (!total) return;
            CourseStore.saveResult(lab, { passed: good, total, ok: CourseReport.ok(report) });
        }

        async function inPage(report, hear) {
            stop = () => session.stop();
            loading.show();
            const payload = { lab, files: { "starter.py": editor.get() }, impl: "starter", timeLimit: TIME_LIMIT };
            CourseReport.ended(report, await session.call("grade", payload, hear));
        }

        /** Save the file and grade it where it lies; what is to be said besides the report, null when it did not run. */
        async function onDisk(report, hear) {
            const control = new AbortController();
            stop = () => control.abort();
            await follow();
            const sent = editor.get();
            const body = { lab, files: { "starter.py": sent }, base };
            const answer = await CourseStore.local("grade", body, { signal: control.signal });
            if (answer.status === 409) return conflict(await answer.json());
            if (!answer.ok) throw new Error((await answer.json()).error);
            let words = "";
            for await (const event of lines(answer.body)) {
                if (event.event === "saved") {
                    base = event.digest;
                    seen = sent;
                    if (CourseStore.edit(lab)?.text === sent) CourseStore.dropEdit(lab);
                } else if (event.event === "report") {
                    report.trouble = event.trouble;
                    words = event.notice;
                    predict?.standing(event);
                } else hear(event);
            }
            return words;
        }

        /** Take over what another editor has saved, where this one has nothing of its own. */
        async function follow() {
            if (editor.get() !== seen) return;
            const now = await json(await CourseStore.local(`lab?id=${lab}`));
            if (!now.digest || now.digest === base || editor.get() !== seen) return; // a file that is gone empties nothing
            base = now.digest;
            seen = now.text;
            editor.set(now.text);
            clearTimeout(timer);
            timer = 0;
            followed?.remove();
            followed = notice("The file on your machine has changed; this is its text now.");
        }

        function conflict({ error, text, digest }) {
            if (text === undefined) throw new Error(error);
            if (!digest) {
                base = digest;
                notice("starter.py is gone from your machine. Nothing was saved.", ["Write this text there", () => grade()])
                    .scrollIntoView({ block: "nearest" });
                return null;
            }
            const mine = editor.get();
            const accept = () => void (base = digest);
            const line = notice("The file on your machine has changed since this page read it. Nothing was saved.",
                ["Take the file's text", () => (accept(), (seen = text), show(text))],
                ["Save mine over it", () => (accept(), keep(() => CourseStore.keepOlder(lab, text)), grade())]);
            line.append(CourseDiff.draw(text, mine, ["the file", "yours, here"]));
            line.scrollIntoView({ block: "nearest" });
            return null;
        }
    }

    // ------------------------------------------------------------ answers

    async function json(answer) {
        const told = await answer.json();
        if (!answer.ok) throw new Error(told.error ?? answer.status);
        return told;
    }

    async function* lines(body) {
        const reader = body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
            const parts = (rest + value).split("\n");
            rest = parts.pop();
            for (const part of parts) yield JSON.parse(part);
        }
    }
};
