// Compile Python ahead: `node compile.mjs JOB`, a file of JSON written by course/site/play.py.
//
// Runs Pyodide's own compiler, whose version is that of the pages. Each archive of sources becomes
// one of compiled modules: a page then begins without compiling what it imports.

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
const compiled = python.runPython(`
import importlib.util, io, pathlib, py_compile, zipfile

def compiled(number, place, optimize, beside, date):
    """An archive of what was unpacked to /in/NUMBER and will lie in place, compiled;
    optimize: 1 leaves out assertions, 2 docstrings too; beside: for where the sources lie too."""
    folder = pathlib.Path(f"/in/{number}")
    kind = "CHECKED_HASH" if beside else "UNCHECKED_HASH"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            name = path.relative_to(folder).as_posix()
            if path.suffix == ".py":
                py_compile.compile(
                    str(path), "/made.pyc", f"{place}/{name}", doraise=True, optimize=optimize,
                    invalidation_mode=py_compile.PycInvalidationMode[kind],
                )
                name = importlib.util.cache_from_source(name) if beside else name + "c"
                path = pathlib.Path("/made.pyc")
            info = zipfile.ZipInfo(name, tuple(date))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, path.read_bytes())
    return out.getvalue()

compiled`);
for (const [number, { from, to, place, optimize, beside }] of job.archives.entries()) {
    python.FS.mkdirTree(`/in/${number}`);
    const sources = new Uint8Array(readFileSync(from)); // a plain one: a Buffer is refused
    python.unpackArchive(sources, "zip", { extractDir: `/in/${number}` });
    writeFileSync(to, compiled(number, place, optimize, beside, python.toPy(job.date)).toJs());
}
process.exit(0);
