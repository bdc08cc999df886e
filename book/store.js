/* What a reader has done, kept in this browser: edits of labs, results, answers, predictions, pages read.
 *
 * One JSON document under the key `course` of localStorage:
 *   {version: 1, edits: {lab: {text, at, from}}, older: {lab: [{text, at}]}, results: {lab: {passed, total, ok, at}},
 *    answers: {question: {given, right, at, box}}, predictions: {"lab/name": {given, at, measured, first}}, read: {page: at},
 *    hunts: {lab: {level, seed, text, began, checks, found, score, of, at}}, tries: {challenge: {tries: [{when, ...}], at}},
 *    incidents: {day: {wrong: [cause], cause, replays, fix, at}}}
 * `at` is a time as toISOString writes it; `from` marks the starter an edit began with. A prediction has `measured`
 * once it was compared: then `first` is the answer that was, where another was given since, and `at` is that answer's
 * time. `box` counts right answers in a row; DAYS says when a question comes back. A document from before there were predictions, hunts, tries or incidents has none. Every change reads the document first, so two tabs
 * lose nothing of each other. A document that cannot be read is set aside under a key of its own. Where nothing can be
 * stored this page still remembers. Nothing global but `CourseStore`.
 */
"use strict";

const CourseStore = (() => {
    const KEY = "course";
    const FORMAT = "course-progress";
    const OLDER = 5; // texts of a lab that are kept beside the one in use
    const DAYS = [0, 1, 3, 7, 21, 60]; // until a question comes back, by its box, as in course/learning/quiz.py
    const LONGEST = 400_000; // characters of one text
    const listeners = [];
    let memory = null; // the document, where localStorage takes nothing
    let notice = "";

    const now = () => new Date().toISOString();
    const empty = () => ({ version: 1, edits: {}, older: {}, results: {}, answers: {}, predictions: {}, read: {},
        hunts: {}, tries: {}, incidents: {} });
    const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
    const shown = (value) => (value === undefined ? "missing" : JSON.stringify(value).slice(0, 60));

    // ------------------------------------------------------------ what a document may hold

    const LAB = /^\d\d-\d\d$/;
    const PREDICTION = /^\d\d-\d\d\/[a-z][a-z0-9_]{0,99}$/;
    const NAME = /^(?!__proto__$)[\w./-]{1,200}$/;
    const isTime = (value) => typeof value === "string" && value.length < 40 && !Number.isNaN(Date.parse(value));
    const isText = (value) => typeof value === "string" && value.length <= LONGEST;
    const isCount = (value) => Number.isInteger(value) && value >= 0;
    const mayBeCount = (value) => value === undefined || isCount(value);
    const isFlag = (value) => typeof value === "boolean";
    const isAnswer = (value) => Number.isFinite(value) || isText(value);
    const mayBeAnswer = (value) => value === undefined || isAnswer(value);
    const mayBeTime = (value) => value === "" || isTime(value);
    /** A try at a challenge, as `course challenge` keeps it, with its text. */
    const isTry = (value) => isObject(value) && isTime(value.when) && isCount(value.score) && isCount(value.fresh)
        && /^[0-9a-f]{12}$/.test(value.digest) && ["seed", "outcome", "why", "note", "text"].every((key) => isText(value[key]))
        && Array.isArray(value.marks) && value.marks.length < 9 && value.marks.every(isText);
    const areTries = (value) => Array.isArray(value) && value.length <= 1000 && value.every(isTry);
    const isWord = (value) => typeof value === "string" && value.length <= 100;
    const areWords = (value) => Array.isArray(value) && value.length < 100 && value.every(isWord);
    const FIELDS = {
        edits: { text: isText, at: isTime },
        results: { passed: isCount, total: isCount, ok: isFlag, at: isTime },
        answers: { given: isText, right: isFlag, at: isTime, box: mayBeCount },
        predictions: { given: isAnswer, at: isTime, measured: mayBeAnswer, first: mayBeAnswer },
        hunts: { level: (value) => [1, 2, 3].includes(value), seed: isCount, text: isText, began: isTime, checks: isCount,
            found: mayBeTime, score: isCount, of: isCount, at: isTime },
        tries: { tries: areTries, at: isTime },
        incidents: { wrong: areWords, cause: isWord, replays: isCount, fix: isWord, at: isTime },
    };
    const NAMES = { edits: LAB, results: LAB, answers: NAME, predictions: PREDICTION, read: NAME, hunts: LAB,
        tries: /^[a-z]{1,40}$/, incidents: /^[a-z]{1,40}$/ };
    const ADDED = ["predictions", "hunts", "tries", "incidents"]; // documents from before have none

    /** Throws an Error that names the first thing which does not belong into a document. */
    function checked(data) {
        if (!isObject(data)) throw new Error(`this is ${shown(data)}: a file of this course is wanted`);
        if (data.version !== 1) throw new Error(`version is ${shown(data.version)}: 1 is wanted`);
        for (const [part, name] of Object.entries(NAMES)) {
            if (data[part] === undefined && ADDED.includes(part)) continue;
            if (!isObject(data[part])) throw new Error(`${part} is ${shown(data[part])}: an object is wanted`);
            for (const [id, entry] of Object.entries(data[part])) {
                const where = `${part}.${id.slice(0, 60)}`;
                if (!name.test(id)) throw new Error(`${where} is no name of this course`);
                if (part === "read") {
                    if (!isTime(entry)) throw new Error(`${where} is ${shown(entry)}: a time is wanted`);
                    continue;
                }
                if (!isObject(entry)) throw new Error(`${where} is ${shown(entry)}: an object is wanted`);
                for (const [key, fits] of Object.entries(FIELDS[part])) {
                    if (!fits(entry[key])) throw new Error(`${where}.${key} is ${shown(entry[key])}`);
                }
                if (!["undefined", "string"].includes(typeof entry.from)) {
                    throw new Error(`${where}.from is ${shown(entry.from)}`);
                }
            }
        }
        return data;
    }

    // ------------------------------------------------------------ reading and writing

    function read() {
        if (memory) return memory;
        let text = null;
        try {
            text = localStorage.getItem(KEY);
        } catch {
            notice = "This browser keeps nothing for this page: what you do is lost when you leave. Export it.";
            return (memory = empty());
        }
        if (text === null) return empty();
        try {
            const data = checked(JSON.parse(text));
            return { ...empty(), ...data, older: soundShelves(data.older) };
        } catch (error) {
            aside(text, error);
            return empty();
        }
    }

    /** Older texts are a help and no record: what does not fit is left out. */
    function soundShelves(older) {
        const fits = (each) => isObject(each) && isText(each.text) && isTime(each.at);
        const shelves = Object.entries(isObject(older) ? older : {}).filter(([lab, shelf]) =>
            LAB.test(lab) && Array.isArray(shelf));
        return Object.fromEntries(shelves.map(([lab, shelf]) => [lab, shelf.filter(fits)]));
    }

    function aside(text, error) {
        const key = `${KEY}.unreadable.${now()}`;
        notice = `What was kept here could not be read (${error.message}); it is set aside as ${key}.`;
        try {
            localStorage.setItem(key, text);
            localStorage.removeItem(KEY);
        } catch {
            notice = `What is kept here cannot be read (${error.message}), nor set aside: nothing new is kept.`;
            memory = empty(); // never over it
        }
    }

    /** Apply `change` to the newest document; true when it is stored. */
    function write(section, id, change) {
        const data = read();
        change(data);
        let kept = memory === null;
        if (kept) {
            try {
                localStorage.setItem(KEY, JSON.stringify(data));
            } catch {
                kept = false;
                memory = data;
                notice = "This browser has no room left for this page: what you do is lost when you leave. Export it.";
            }
        }
        tell({ section, id, elsewhere: false });
        return kept;
    }

    function tell(change) {
        for (const listener of listeners) listener(change);
    }

    window.addEventListener("storage", (event) => {
        if (event.key === KEY || event.key === null) tell({ section: null, id: null, elsewhere: true });
    });

    // ------------------------------------------------------------ when a question comes back

    /** The day of a time, counted in this reader's own days. */
    const dayOf = (time) => {
        const day = new Date(time);
        return Math.round(Date.UTC(day.getFullYear(), day.getMonth(), day.getDate()) / 86_400_000);
    };
    const boxOf = (entry) => (entry === null ? 0 : Math.min(entry.box ?? (entry.right ? 1 : 0), DAYS.length - 1));
    const isDue = (entry) => {
        if (entry === null) return false;
        const ago = dayOf(now()) - dayOf(entry.at);
        return ago > 0 && ago >= DAYS[boxOf(entry)];
    };

    const own = (part, id) => (Object.hasOwn(part, id) ? part[id] : null);

    /** Keep a text that is about to be replaced, unless it is there already. */
    function shelve(data, lab, entry) {
        const shelf = (own(data.older, lab) ?? []).filter((each) => each.text !== entry.text);
        data.older[lab] = [{ text: entry.text, at: entry.at }, ...shelf].slice(0, OLDER);
    }

    function known(id, pattern) {
        if (!pattern.test(id)) throw new Error(`${shown(id)} is no name of this course`);
        return id;
    }

    // ------------------------------------------------------------ taking a file in

    /** Merge an exported file: of two entries the newer counts, and a text that gives way is kept as an older one.
     * Of two predictions one that was compared counts, of two such the older: the first answer.
     *
     * Returns how many entries of each kind were taken. Throws an Error that names what is wrong; nothing is then
     * changed.
     */
    function imported(text) {
        let data;
        try {
            data = JSON.parse(text);
        } catch {
            throw new Error("this is not JSON: choose a file that was exported here, or by `course export`");
        }
        if (!isObject(data) || data.format !== FORMAT) {
            throw new Error(`format is ${shown(data?.format)}: "${FORMAT}" is wanted`);
        }
        checked(data);
        const taken = Object.fromEntries(Object.keys(NAMES).map((part) => [part, 0]));
        write(null, null, (document) => {
            for (const [lab, texts] of Object.entries(soundShelves(data.older))) takeOlder(document, lab, texts);
            for (const part of Object.keys(taken)) {
                for (const [id, entry] of Object.entries(data[part] ?? {})) {
                    taken[part] += merge(document, part, id, entry);
                }
            }
        });
        return taken;
    }

    /** Put a file's older texts among those that are here, the newest first, each text once. */
    function takeOlder(document, lab, texts) {
        const all = [...(own(document.older, lab) ?? []), ...texts.map(({ text, at }) => ({ text, at }))];
        all.sort((a, b) => Date.parse(b.at) - Date.parse(a.at));
        const first = new Map(all.toReversed().map((each) => [each.text, each]));
        document.older[lab] = all.filter((each) => first.get(each.text) === each).slice(0, OLDER);
    }

    /** The tries of both, each once, oldest first. */
    function bothTries(mine, theirs) {
        const name = (each) => `${each.when} ${each.digest}`;
        const all = new Map([...theirs, ...mine].map((each) => [name(each), each]));
        return [...all.values()].sort((a, b) => Date.parse(a.when) - Date.parse(b.when)).slice(-1000);
    }

    function merge(document, part, id, entry) {
        const mine = own(document[part], id);
        const time = (each) => Date.parse(part === "read" ? each : each.at);
        const compared = (each) => part === "predictions" && each.measured !== undefined;
        const newer = mine === null || (compared(mine) !== compared(entry) ? compared(entry)
            : compared(mine) ? time(entry) < time(mine) : time(entry) > time(mine));
        if (part === "edits" && mine !== null && mine.text !== entry.text) {
            shelve(document, id, newer ? mine : entry);
        }
        if (part === "tries" && mine !== null) {
            const tries = bothTries(mine.tries, entry.tries);
            const added = tries.length > mine.tries.length;
            if (added) document.tries[id] = { tries, at: newer ? entry.at : mine.at };
            return added ? 1 : 0;
        }
        if (newer) document[part][id] = part === "read" ? entry : fieldsOf(part, entry);
        return newer ? 1 : 0;
    }

    /** What of an entry this page knows. */
    function fieldsOf(part, entry) {
        const names = [...Object.keys(FIELDS[part]), ...(part === "edits" ? ["from"] : [])];
        return Object.fromEntries(names.map((name) => [name, entry[name]]));
    }

    // ------------------------------------------------------------ the local course, under `course book serve`

    const token = document.querySelector('meta[name="course-token"]')?.content ?? null;

    /** Ask the `course book serve` that sent this page; a body makes it a POST. Null where there is none. */
    function local(path, body = undefined, options = {}) {
        if (token === null) return null;
        const headers = { "X-Course-Token": token };
        if (body !== undefined) headers["Content-Type"] = "application/json";
        const method = body === undefined ? "GET" : "POST";
        return fetch(`/.course/${path}`, { method, headers, body: body && JSON.stringify(body), ...options });
    }

    return {
        /** {text, at, from} or null. */
        edit: (lab) => own(read().edits, lab),
        /** True when it is stored; `from` marks the starter that the edit began with. */
        saveEdit: (lab, text, from = undefined) => {
            known(lab, LAB);
            if (!isText(text)) throw new Error(`the text has more than ${LONGEST} characters`);
            return write("edits", lab, (data) => {
                data.edits[lab] = { text, at: now(), from: from ?? own(data.edits, lab)?.from };
            });
        },
        /** Forget the edit; its text is kept as an older one. */
        dropEdit: (lab) => write("edits", lab, (data) => {
            const entry = own(data.edits, lab);
            if (entry) shelve(data, lab, entry);
            delete data.edits[lab];
        }),
        /** Texts that gave way to others, newest first: [{text, at}]. */
        older: (lab) => own(read().older, lab) ?? [],
        /** Keep a text as an older one. */
        keepOlder: (lab, text) => {
            known(lab, LAB);
            if (!isText(text)) throw new Error(`the text has more than ${LONGEST} characters`);
            return write("older", lab, (data) => shelve(data, lab, { text, at: now() }));
        },
        result: (lab) => own(read().results, lab),
        results: () => ({ ...read().results }),
        saveResult: (lab, { passed, total, ok, at = now() }) => write("results", known(lab, LAB), (data) => {
            data.results[lab] = { passed, total, ok, at };
        }),
        answer: (question) => own(read().answers, question),
        /** A right answer moves its question a box on, once a day; a wrong one puts it into the first. */
        saveAnswer: (question, { given, right, at = now() }) => write("answers", known(question, NAME), (data) => {
            const before = own(data.answers, question);
            const on = before === null || dayOf(before.at) < dayOf(at) ? 1 : 0;
            const box = right ? Math.min(Math.max(boxOf(before) + on, 1), DAYS.length - 1) : 0;
            data.answers[question] = { given, right, at, box };
        }),
        /** Whether a question that was answered on an earlier day is due. */
        dueAgain: (question) => isDue(own(read().answers, question)),
        /** The questions that are due, by id. */
        allDue: () => Object.entries(read().answers).filter(([, entry]) => isDue(entry)).map(([id]) => id).sort(),
        /** What was predicted in a lab, by name: {given, at, measured, first}. */
        predictions: (lab) => {
            const own = Object.entries(read().predictions).filter(([id]) => id.startsWith(`${lab}/`));
            return new Map(own.map(([id, entry]) => [id.slice(lab.length + 1), entry]));
        },
        /** Commit an answer, a number or a text; the one that was compared stays beside it. */
        savePrediction: (lab, name, given) => write("predictions", known(`${lab}/${name}`, PREDICTION), (data) => {
            if (!isAnswer(given)) throw new Error(`given is ${shown(given)}: a number or a text is wanted`);
            const { at, measured, first, given: before } = own(data.predictions, `${lab}/${name}`) ?? {};
            data.predictions[`${lab}/${name}`] = measured === undefined ? { given, at: now() }
                : { given, at, measured, first: first ?? before };
        }),
        /** Keep what was measured beside a committed answer; the first comparison stays. */
        saveMeasured: (lab, name, measured) => write("predictions", known(`${lab}/${name}`, PREDICTION), (data) => {
            if (!isAnswer(measured)) throw new Error(`measured is ${shown(measured)}: a number or a text is wanted`);
            const entry = own(data.predictions, `${lab}/${name}`);
            if (entry && entry.measured === undefined) entry.measured = measured;
        }),
        /** When a page was read, or null. */
        read: (page) => own(read().read, page),
        pagesRead: () => ({ ...read().read }),
        saveRead: (page) => write("read", known(page, NAME), (data) => {
            data.read[page] = now();
        }),
        /** The lab's hunt: {level, seed, text, began, checks, found, score, of, at}, or null. `found` is "" until then. */
        hunt: (lab) => own(read().hunts, lab),
        saveHunt: (lab, { level, seed, text, began, checks = 0, found = "", score = 0, of = 0 }) => {
            const entry = { level, seed, text, began, checks, found, score, of, at: now() };
            const wrong = Object.entries(FIELDS.hunts).find(([key, fits]) => !fits(entry[key]));
            if (wrong) throw new Error(`${wrong[0]} is ${shown(entry[wrong[0]])}`);
            return write("hunts", known(lab, LAB), (data) => void (data.hunts[lab] = entry));
        },
        /** Tries at challenges, by challenge, oldest first. */
        tries: () => Object.fromEntries(Object.entries(read().tries).map(([name, entry]) => [name, entry.tries])),
        /** What was done about a bad day: {wrong, cause, replays, fix, at}, or null. */
        incident: (day) => own(read().incidents, day),
        saveIncident: (day, { wrong, cause, replays, fix }) => write("incidents", known(day, NAMES.incidents), (data) => {
            data.incidents[day] = { wrong, cause, replays, fix, at: now() };
        }),
        /** Everything as the text of a file, for another browser or for `course import`. */
        exported: () => {
            const { edits, older, results, answers, predictions, read: pages, hunts, tries, incidents } = read();
            const data = {
                format: FORMAT, version: 1, exported_at: now(), edits, older, results, answers, predictions, read: pages,
                hunts, tries, incidents,
            };
            return JSON.stringify(data, null, 1) + "\n";
        },
        imported,
        /** Call back after each change, with {section, id, elsewhere}; `elsewhere`: in another tab. */
        onchange: (callback) => void listeners.push(callback),
        /** What a reader should know about the storage, or "". */
        notice: () => (read(), notice),
        local,
    };
})();
