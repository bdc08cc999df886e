// The pages come in colours (course/site/colours.py); mdBook's own script asks for these names.
window.hljs = { configure() {}, highlightBlock() {} };
