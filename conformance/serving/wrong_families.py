"""Wrong families of tool parsers and wrong chats, each one edit away from the right ones.

An entry is the module, what the wrong one does, and what is replaced by what.
"""

from __future__ import annotations

from types import ModuleType

from mini_vllm.entrypoints.openai import (
    chat,
    reasoning_parsers,
    serving,
    tool_parsers,
    tool_parsers_glm,
    tool_parsers_mistral,
    tool_parsers_qwen,
    tool_schemas,
)

Wrong = tuple[ModuleType, str, str, str]
GLM = tool_parsers_glm
QWEN = tool_parsers_qwen
MISTRAL = tool_parsers_mistral
SCHEMAS = tool_schemas


WRONG: tuple[Wrong, ...] = (
    (GLM, "reads no Python", "return ast.literal_eval(text)", "return text"),
    (
        GLM,
        "takes a line end for nothing",
        r"{OPEN}([^\n]*)\n(.*){CLOSE}",
        r"{OPEN}([^\n]*?)\n?(.*){CLOSE}",
    ),
    (
        GLM,
        "keeps content that is blank",
        "said_in(text[: text.find(OPEN)])",
        "text[: text.find(OPEN)]",
    ),
    (
        GLM,
        "reads calls where no tool is offered",
        "not self.tools or self.tool_choice",
        "self.tool_choice",
    ),
    (
        GLM,
        "reads calls that were not wanted",
        '        if not self.tools or self.tool_choice == "none":',
        "        if not self.tools:",
    ),
    (GLM, "sends no text between calls", "            content += self.text[at:begin]\n", ""),
    (
        GLM,
        "holds no tag back",
        "end = len(self.text) - held_back(self.text[at:], OPEN)",
        "end = len(self.text)",
    ),
    (GLM, "looks at all content again", "        self.sent_to = at\n", ""),
    (
        GLM,
        "names the next call first",
        "            if name is None:\n                break\n",
        "            if name is None:\n                continue\n",
    ),
    (
        GLM,
        "waits for the whole value",
        "if keys and body.rfind(VALUE_END) < begin:",
        "if keys and whole and body.rfind(VALUE_END) < begin:",
    ),
    (GLM, "takes the first key for the last value", "keys[-1].strip()", "keys[0].strip()"),
    (
        GLM,
        "holds no end of a value back",
        "value[: len(value) - held_back(value, VALUE_END)]",
        "value",
    ),
    (
        GLM,
        "closes a string that goes on",
        "written = _dumped(value)[:-1]",
        "written = _dumped(value)",
    ),
    (
        GLM,
        "strips what is written of a number",
        "                written = value\n",
        "                written = value.strip()\n",
    ),
    (GLM, "calls without arguments", 'return "{}" if whole else ""', 'return ""'),
    (
        GLM,
        "opens arguments at once",
        'return "{}" if whole else ""',
        'return "{}" if whole else "{"',
    ),
    (
        GLM,
        "strips strings",
        "return text if self._is_string",
        "return text.strip() if self._is_string",
    ),
    (GLM, "takes what may be null for no string", ' - {"null"} ==', " =="),
    (GLM, "takes an unknown argument for a string", "schema is not None and", "schema is None or"),
    (GLM, "names at a line end alone", r"(?:\n|{KEY})", r"\n"),
    (GLM, "wants a blank after a name", r"{OPEN}\s*(\S+?)\s*({KEY}", r"{OPEN}\s*(\S+?)\s+({KEY}"),
    (GLM, "wants arguments", "({KEY}.*)?{CLOSE}", "({KEY}.*){CLOSE}"),
    (
        QWEN,
        "needs tags around a whole call",
        "_BLOCK.findall(text) or [text]",
        "_BLOCK.findall(text)",
    ),
    (QWEN, "needs the end of a whole call", "(.*?)(?:{CLOSE}|$)", "(.*?){CLOSE}"),
    (QWEN, "needs the end of a parameter", "(?={PARAMETER})|$)", "(?={PARAMETER}))"),
    (QWEN, "strips values", 'value.removeprefix("\\n").removesuffix("\\n")', "value.strip()"),
    (
        QWEN,
        "cuts content at the function",
        "text.find(OPEN) if OPEN in text else text.find(FUNCTION)",
        "text.find(FUNCTION)",
    ),
    (
        QWEN,
        "goes on where a piece was used up",
        "            return None  # the piece is used up\n",
        "",
    ),
    (QWEN, "never leaves a call", "self.started = self.index < self.text.count(OPEN)", "pass"),
    (QWEN, "sees no id of a tag", "if tag or self.vocab[OPEN] in token_ids:", "if tag:"),
    (
        QWEN,
        "sees the id of a tag alone",
        "if tag or self.vocab[OPEN] in token_ids:",
        "if self.vocab[OPEN] in token_ids:",
    ),
    (
        QWEN,
        "drops what stands before a tag",
        'return {"content": before} if tag and before else None',
        "return None",
    ),
    (
        QWEN,
        "sends blanks between calls",
        "if not piece.strip() and self.text.rstrip()",
        "if not piece and self.text.rstrip()",
    ),
    (
        QWEN,
        "says nothing without text",
        "if not token_ids or self.vocab[CLOSE] in token_ids:",
        "if True:",
    ),
    (QWEN, "says something at an end tag", " or self.vocab[CLOSE] in token_ids:", ":"),
    (
        QWEN,
        "says something inside a call",
        "if self.text and not self.started else None",
        "if self.text else None",
    ),
    (
        QWEN,
        "says something after half a call",
        'return {"content": ""} if whole else None',
        'return {"content": ""}',
    ),
    (
        QWEN,
        "opens arguments with the name",
        '            self.next = "{"\n',
        '            self.next = "parameters"\n',
    ),
    (
        QWEN,
        "closes with the last parameter",
        'if new := "".join(self._new_parameters(call)):',
        "if new := FUNCTION_END not in call and ''.join(self._new_parameters(call)):",
    ),
    (
        QWEN,
        "sends a parameter that goes on",
        "            if not end or stop < 0:\n                return\n",
        "            if not end:\n                return\n",
    ),
    (
        QWEN,
        "ends a value at its own tag alone",
        "stop = min(tags) if tags else value.find(CLOSE)",
        "stop = -1",
    ),
    (QWEN, "ends a value at the last tag", "min(tags)", "max(tags)"),
    (
        QWEN,
        "keeps a line end before a value",
        '            value = value.removeprefix("\\n")\n',
        "",
    ),
    (
        QWEN,
        "keeps a line end after a value",
        '.removesuffix("\\n"))\n            written',
        ")\n            written",
    ),
    (QWEN, "sends a parameter again", "            self.num_parameters += 1\n", ""),
    (
        QWEN,
        "gives a streamed id the usual form",
        'f"call_{uuid.uuid4().hex[:24]}"',
        'f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"',
    ),
    (SCHEMAS, "takes every enum for strings", "type(value)] for", "str] for"),
    (SCHEMAS, "knows no choice of types", '("anyOf", "oneOf", "allOf")', "()"),
    (
        reasoning_parsers,
        "reads the tokens of thoughts as content",
        "token_ids = token_ids[token_ids.index(self.thinking.tags.end) + 1 :]",
        "pass",
    ),
    (
        reasoning_parsers,
        "reads no tokens behind thoughts",
        "self.rest.feed(piece, token_ids)",
        "self.rest.feed(piece)",
    ),
    (
        SCHEMAS,
        "knows one type of several",
        "given if isinstance(given, list) else [given]",
        "[given]",
    ),
    (SCHEMAS, "tries numbers first", 'if "null" in named and lower == "null":', "if False:"),
    (SCHEMAS, "leaves whole floats", "int(found) if found == int(found) else found", "found"),
    (
        SCHEMAS,
        "knows no other names of types",
        "_TYPE_OF.get(kind.strip().lower(), kind.strip().lower())",
        "kind",
    ),
    (SCHEMAS, "takes 1 for no boolean", '("true", "1", "false", "0")', '("true", "false")'),
    (SCHEMAS, "reads every text as JSON", 'if "string" in named and', "if False and"),
)


WRONG_CHATS: tuple[Wrong, ...] = (
    (
        chat,
        "leaves the last delta",
        "if ended and calls:\n            message",
        "if False:\n            message",
    ),
    (
        chat,
        "wants a whole call for its reason",
        "if ended and (calls or (choice.called",
        "if ended and ((choice.called",
    ),
    (
        chat,
        "calls a named tool a stop",
        "if ended and (calls or (choice.called and not named)):",
        "if ended and choice.called and not named:",
    ),
    (chat, "calls a forced call a call", "and self.parses and not self.forced", "and self.parses"),
    (chat, "reads what a constraint forces", "return not self.served.forces_json", "return True"),
    (
        chat,
        "reads forced calls as JSON",
        "        if self.forced:\n            return not self.served.forces_json\n",
        "        if self.forced:\n            return False\n",
    ),
    (
        chat,
        "streams forced calls as JSON",
        "if self.forced and self.served.forces_json:",
        "if self.forced:",
    ),
    (
        chat,
        "streams what a constraint forces",
        "if self.forced and self.served.forces_json:",
        "if False:",
    ),
    (
        chat,
        "keeps content beside a forced call",
        'return "" if self.forced else content, calls',
        "return content, calls",
    ),
    (
        chat,
        "offers the parser no tools",
        "request.tools or (), request.tool_choice)",
        "(), request.tool_choice)",
    ),
    (
        tool_parsers,
        "sends the last arguments twice",
        "last.arguments[: -len(newest)] if newest else",
        "last.arguments[:0] if newest else",
    ),
    (
        tool_parsers,
        "looks at the last call of a delta",
        'deltas[0]["function"].get("arguments")',
        'deltas[-1]["function"].get("arguments")',
    ),
    (
        tool_parsers,
        "completes the first call",
        "index, last = len(calls) - 1, calls[-1]",
        "index, last = 0, calls[0]",
    ),
    (
        tool_parsers,
        "expects nothing of a call without arguments",
        'self.arguments or "{}"',
        "self.arguments",
    ),
    (
        tool_parsers,
        "expects what was sent",
        "return self.parsed or self.arguments",
        "return self.arguments",
    ),
    (
        tool_parsers,
        "forgets the name in a last delta",
        'name = own.get("function", {}).get("name")',
        "name = None",
    ),
    (
        tool_parsers,
        "keeps blank content beside a call",
        "content if content and content.strip() else None",
        "content or None",
    ),
    (
        serving,
        "takes what a value raises for a fault of the server",
        "except (ValueError, TypeError, OverflowError) as error:",
        "except () as error:",
    ),
)
