// Python in a worker: the course's own code, run beside the page and never by it.
//
// A module. Messages in: {id, kind, payload}; the first is kind "boot" with the page's COURSE_PLAY.
// Messages out: {id, event}, {id, result}, {id, error, fatal}, {progress}. Files of the course that
// were not loaded ahead are fetched when Python opens them. course/site/play_check.py runs this
// same file in Node.

const ROOT = "/course";
const WASM = "pyodide.asm.wasm";
const LIBRARY = "/lib/python3.14";
const PACKAGES = `${LIBRARY}/site-packages`;
const progress = { loaded: 0, total: 0 };
const labs = new Map(); // id -> promise of the lab's files being there
let config = null;
let booting = null;
let pyodide = null;
let python = null; // course.play.worker

self.onmessage = async ({ data }) => {
    const { id, kind, payload } = data;
    try {
        if (kind === "boot") {
            config = payload;
            booting = booting || boot();
            await booting;
            self.postMessage({ id, result: {} });
        } else {
            await booting;
            if (kind === "grade") {
                await lab(payload.lab);
            }
            const told = JSON.parse(called(kind, payload, id));
            self.postMessage({ id, ...told, memory: pyodide._module.HEAPU8.length });
        }
    } catch (error) {
        self.postMessage({ id, error: String(error.message || error), fatal: !python });
    }
};

// The answer of course.play.worker, which never raises: an error is Python's own end.
function called(kind, payload, id) {
    const skip = kind === "grade" ? { skip: config.labs[payload.lab].skip } : {};
    const text = JSON.stringify({ ...skip, ...payload });
    try {
        return python.call(kind, text, (line) => self.postMessage({ id, event: JSON.parse(line) }));
    } catch (error) {
        python = null;
        const why = /call stack|stack overflow|RangeError/i.test(String(error))
            ? "more calls inside each other than a page has room for"
            : String(error.message || error).slice(0, 500);
        throw new Error(`Python ended: ${why}`);
    }
}

// ------------------------------------------------------------------ loading

function tell(what) {
    self.postMessage({ progress: { ...progress, what } });
}

// The bytes of one file of play/, counted while they come.
async function bytes(name, size, what) {
    progress.total += size;
    const answer = await fetch(config.base + name);
    if (!answer.ok) {
        throw new Error(`${name}: ${answer.status}`);
    }
    const whole = new Uint8Array(await counted(answer, size, what).arrayBuffer());
    return whole;
}

// `answer`, whose bytes are counted by a copy of it; `size` is what it has unpacked.
function counted(answer, size, what) {
    let left = size;
    const reader = answer.clone().body.getReader();
    const next = ({ done, value }) => {
        const came = done ? left : Math.min(left, value.length);
        left -= came;
        progress.loaded += came;
        tell(what);
        return done ? null : reader.read().then(next);
    };
    reader.read().then(next).catch(() => {}); // whoever reads the answer itself hears of an error
    return answer;
}

async function boot() {
    const { runtime, course, catalog } = config;
    const folder = config.base + runtime.folder;
    const fetched = self.fetch;
    // Pyodide asks for its own parts one after the other; they are asked for at once, and counted as well.
    const early = import(folder + "pyodide.asm.mjs");
    const wasm = fetched(folder + WASM);
    for (const each of [early, wasm]) {
        each.catch(() => {}); // Pyodide hears of an error
    }
    self.fetch = async (request, options) => {
        const name = String(request.url || request).slice(folder.length);
        const answer = await (name === WASM ? wasm : fetched(request, options));
        const size = answer.ok && runtime.files[name];
        return size ? counted(answer, size, "Python") : answer;
    };
    for (const size of Object.values(runtime.files)) {
        progress.total += size;
    }
    tell("Python");
    const archive = ({ file, bytes: size }, what) => bytes(file, size, what).then(files);
    const library = archive(runtime.library, "Python");
    const coming = [
        library,
        archive(runtime.numpy, "numpy"),
        archive(runtime.tools, "pytest"),
        archive(course, "the course"),
        bytes(catalog.file, catalog.bytes, "the course"),
    ];
    for (const each of coming) {
        each.catch(() => {}); // awaited below; until then no error is unheard
    }
    const { loadPyodide } = await import(folder + "pyodide.mjs");
    const starting = loadPyodide({
        indexURL: folder,
        lockFileContents: runtime.lock,
        packageBaseUrl: folder,
        stdout: () => {},
        stderr: () => {},
        env: config.env,
        fsInit: (FS) => library.then((files) => put(FS, LIBRARY, files), () => {}),
    });
    const [machine, , numpy, tools, own, catalogue] = await Promise.all([starting, ...coming]);
    self.fetch = fetched;
    put(machine.FS, PACKAGES, numpy);
    put(machine.FS, PACKAGES, tools);
    place(machine.FS, JSON.parse(new TextDecoder().decode(catalogue)));
    put(machine.FS, ROOT, own);
    machine.runPython(`import sys\nsys.path.insert(0, "${ROOT}")`);
    pyodide = machine;
    python = machine.pyimport("course.play.worker");
    python.begin(ROOT);
}

// A lab's own files, fetched once.
function lab(id) {
    const entry = config.labs[id];
    if (!entry) {
        throw new Error(`there is no lab ${id}`);
    }
    if (!labs.has(id)) {
        const coming = bytes(entry.file, entry.bytes, `lab ${id}`).then(files).then((own) => {
            put(pyodide.FS, ROOT, own);
            python.keep(id, entry.folder);
        });
        labs.set(id, coming);
        coming.catch(() => labs.delete(id));
    }
    return labs.get(id);
}

// ------------------------------------------------------------------ archives

// The files of an archive of play/, [path, bytes] each: a zip of files as they are, compressed whole. The
// browser inflates it while Python starts; Python's own zipfile would do it after, and slower.
async function files(packed) {
    const out = new Response(packed).body.pipeThrough(new DecompressionStream("gzip"));
    const zip = new Uint8Array(await new Response(out).arrayBuffer());
    const view = new DataView(zip.buffer);
    const end = zip.length - 22; // the record that ends a zip without a comment
    let at = view.getUint32(end + 16, true);
    return Array.from({ length: view.getUint16(end + 10, true) }, () => {
        const length = view.getUint16(at + 28, true);
        const path = new TextDecoder().decode(zip.subarray(at + 46, at + 46 + length));
        const local = view.getUint32(at + 42, true);
        const from = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
        const data = zip.subarray(from, from + view.getUint32(at + 24, true));
        at += 46 + length + view.getUint16(at + 30, true) + view.getUint16(at + 32, true);
        return [path, data];
    });
}

function put(FS, root, all) {
    for (const [path, data] of all) {
        const node = placed(FS, `${root}/${path}`);
        node.contents = data;
        node.usedBytes = data.length;
        node.mtime = 0; // that of the source, in a test that came compiled
    }
}

const folders = new Map(); // path -> node, so that thousands of files are placed without a walk each
let usual = null; // what a file does

// The node of the file of that path, which is made, or does again what a file does.
function placed(FS, path) {
    const cut = path.lastIndexOf("/");
    const folder = path.slice(0, cut);
    if (!folders.has(folder)) {
        FS.mkdirTree(folder);
        folders.set(folder, FS.lookupPath(folder).node);
    }
    const parent = folders.get(folder);
    const name = path.slice(cut + 1);
    const node = parent.contents[name] || parent.node_ops.mknod(parent, name, 0o100644, 0);
    usual ||= node.stream_ops;
    node.stream_ops = usual;
    return node;
}

// ------------------------------------------------------------------ files that come when opened

// Every file of the catalogue stands in its folder with its size, and is fetched at its first open.
function place(FS, catalogue) {
    for (const [path, [file, size]] of Object.entries(catalogue)) {
        const node = placed(FS, `${ROOT}/${path}`);
        node.usedBytes = size;
        node.stream_ops = {
            ...usual,
            open(stream) {
                if (node.usedBytes === size) { // not cut off by opening it for writing
                    node.contents = atOnce(file, size, path) || refuse(FS);
                }
                node.stream_ops = usual;
                stream.stream_ops = usual;
            },
        };
    }
}

function refuse(FS) {
    throw new FS.ErrnoError(29); // an OSError in Python: input or output failed
}

// The bytes of a file, before this returns: only a worker may wait so. Null where they do not come.
function atOnce(file, size, path) {
    progress.total += size;
    tell(path);
    const request = new XMLHttpRequest();
    request.open("GET", config.base + file, false);
    request.responseType = "arraybuffer";
    try {
        request.send();
    } catch {
        return null;
    }
    if (request.status !== 200 || request.response.byteLength !== size) {
        return null;
    }
    progress.loaded += size;
    tell(path);
    return new Uint8Array(request.response);
}
