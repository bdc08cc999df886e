// Compile Python ahead: `node compile.mjs JOB`, a file of JSON written by course/site/play.py.
//
// Runs Pyodide's own compiler, whose version is that of the pages. Each archive of sources becomes
// one of compiled modules: a page then begins without compiling what it imports. Where `tools` names
// the archive of pytest, tests are compiled as pytest rewrites them.

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

process.on("uncaughtException", (error) => { // without the line of code, which is a whole file
    console.error(String(error));
    process.exit(1);
});
const job = JSON.parse(readFileSync(process.argv[2], "utf-8"));
const { loadPyodide } = await import(pathToFileURL(job.core + "pyodide.mjs"));
const python = await loadPyodide({
    indexURL: job.core,
    lockFileContents: job.lock,
    packageBaseUrl: job.core,
    env: { HOME: "/home/pyodide", PYTHONHASHSEED: "0" }, // the same sources are the same bytes
});
if (job.tools) {
    unpack(job.tools, job.packages);
}

function unpack(archive, folder) {
    python.FS.mkdirTree(folder);
    const files = new Uint8Array(readFileSync(archive)); // a plain one: a Buffer is refused
    python.unpackArchive(files, "zip", { extractDir: folder });
}

const compiled = python.runPython(`
import importlib.util, io, os, pathlib, py_compile, zipfile

MADE = pathlib.Path("/made.pyc")

def compiled(folder, place, optimize, beside, date):
    """An archive of what was unpacked to folder and will lie in place, compiled;
    optimize: 1 leaves out assertions, 2 docstrings too; beside: for where the sources lie too."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(each for each in pathlib.Path(folder).rglob("*") if each.is_file()):
            name = path.relative_to(folder).as_posix()
            if beside and (path.name.startswith("test_") or path.name == "conftest.py"):
                name = rewritten(path, pathlib.Path(name))
                path = MADE
            elif path.suffix == ".py":
                py_compile.compile(
                    str(path), str(MADE), f"{place}/{name}", doraise=True, optimize=optimize,
                    invalidation_mode=py_compile.PycInvalidationMode[
                        "CHECKED_HASH" if beside else "UNCHECKED_HASH"
                    ],
                )
                name = importlib.util.cache_from_source(name) if beside else name + "c"
                path = MADE
            info = zipfile.ZipInfo(name, tuple(date))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, path.read_bytes())
    return out.getvalue()

def rewritten(path, name):
    """Make what pytest keeps of a test whose assertions say what they compared; its name."""
    from _pytest.assertion import rewrite

    os.utime(path, (0, 0))  # as in the page: pytest compares the times
    with MADE.open("wb") as file:
        rewrite._write_pyc_fp(file, *rewrite._rewrite_test(path, None))
    return f"{name.parent}/__pycache__/{name.stem}{rewrite.PYC_TAIL}".removeprefix("./")

compiled`);
for (const [number, { from, to, place, optimize, beside }] of job.archives.entries()) {
    const folder = beside ? place : `/in/${number}`; // a test says by its path where it lies
    unpack(from, folder);
    writeFileSync(to, compiled(folder, place, optimize, beside, python.toPy(job.date)).toJs());
}
process.exit(0);
