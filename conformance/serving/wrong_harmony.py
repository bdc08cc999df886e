"""Wrong readers of harmony and wrong chats, each one edit away from the right ones.

An entry is the module, what the wrong one does, and what is replaced by what.
"""

from __future__ import annotations

from types import ModuleType

from mini_vllm.entrypoints.openai import chat, harmony_prompt, tool_parsers_openai

Wrong = tuple[ModuleType, str, str, str]
HARMONY = tool_parsers_openai
PROMPT = harmony_prompt

WRONG: tuple[Wrong, ...] = (
    # headers
    (HARMONY, "takes a channel up to a space alone", 'f"[{_WHITE}<]", after', '" ", after'),
    (
        HARMONY,
        "takes a header without a channel behind the tag",
        "        if not channel:\n",
        "        if False:\n",
    ),
    (HARMONY, "takes Python's white space", 'f"[{_WHITE}<]", after', r'r"[\s<]", after'),
    (
        HARMONY,
        "trims no header",
        're.sub(f"^[{_WHITE}]+|[{_WHITE}]+$", "", before + after)',
        "before + after",
    ),
    (
        HARMONY,
        "takes a type that follows a recipient for a part of it",
        'header.replace(CONSTRAIN, f" {CONSTRAIN}")',
        "header",
    ),
    (HARMONY, "splits at every white space", r'r"[^ \t\n\f\r]+"', r'r"\S+"'),
    (HARMONY, "takes the first header for another", "not self.ended)", "False)"),
    (HARMONY, "takes every header for the first", "not self.ended)", "True)"),
    (
        HARMONY,
        "wants no role",
        'raise HarmonyError("a header has no role")',
        'words = ["assistant"]',
    ),
    (
        HARMONY,
        "takes any word for a role",
        "        if role not in ROLES:\n",
        "        if False:\n",
    ),
    (
        HARMONY,
        "refuses a role that it does not know",
        'if len(words) == 1 and not role.startswith("to="):',
        "if True:",
    ),
    (
        HARMONY,
        "takes a recipient for no role",
        'if len(words) == 1 and not role.startswith("to="):',
        "if len(words) == 1:",
    ),
    (
        HARMONY,
        "takes an unknown role for the assistant",
        '            role = "tool"\n',
        '            role = "assistant"\n',
    ),
    (
        HARMONY,
        "keeps a role that is said",
        "    if words[:1] == [role]:\n        del words[0]\n",
        "",
    ),
    (
        HARMONY,
        "takes one word for a type",
        'if len(words) > 1 and not words[-1].startswith("to="):',
        'if words and not words[-1].startswith("to="):',
    ),
    (
        HARMONY,
        "takes a recipient for a type",
        'if len(words) > 1 and not words[-1].startswith("to="):',
        "if len(words) > 1:",
    ),
    (HARMONY, "keeps to= in a recipient", '.removeprefix("to=")', ""),
    (
        HARMONY,
        "lets words of a header be",
        "    if words:\n        raise HarmonyError",
        "    if False:\n        raise HarmonyError",
    ),
    # recipients
    (
        HARMONY,
        "calls a tag",
        '            if not recipient or recipient.startswith("<|")'[12:],
        "if not recipient",
    ),
    (HARMONY, "calls the assistant", ' or recipient == "assistant"', ""),
    (
        HARMONY,
        "calls a function without a name",
        'return bool(name) if first == "functions" and "." in recipient else',
        "return",
    ),
    (
        HARMONY,
        "calls functions by their prefix alone",
        'first == "functions" and "." in recipient else first not in BUILT_IN',
        "True else False",
    ),
    (HARMONY, "calls what is built in", "first not in BUILT_IN", "True"),
    (
        HARMONY,
        "calls a part of what is built in",
        "first not in BUILT_IN",
        "recipient not in BUILT_IN",
    ),
    (HARMONY, "keeps the prefix of a name", '.removeprefix("functions.")', ""),
    # messages
    (
        HARMONY,
        "ends a message at its own end alone",
        'ENDS = ("<|end|>", "<|return|>", "<|call|>")',
        'ENDS = ("<|end|>", "<|return|>")',
    ),
    (
        HARMONY,
        "begins a message anywhere",
        "                if part != START:\n",
        "                if False:\n",
    ),
    (
        HARMONY,
        "begins a message inside of another",
        "                if part in ENDS:\n",
        "                if part in (*ENDS, START):\n",
    ),
    (
        HARMONY,
        "ends a header at an end",
        "            elif part == MESSAGE:\n",
        "            elif part in (MESSAGE, *ENDS):\n",
    ),
    (HARMONY, "begins content at its first word", '                yield self.current, ""\n', ""),
    # whole answers
    (HARMONY, "drops what was cut", "read.ended + read.unfinished", "read.ended"),
    (
        HARMONY,
        "drops content that was cut",
        "if not message.calls] + read.unfinished",
        "if not message.calls]",
    ),
    (HARMONY, "joins reasoning without lines", 'reasoning = "\\n".join(', 'reasoning = "".join('),
    (HARMONY, "joins content without lines", 'content = "\\n".join(', 'content = "".join('),
    (
        HARMONY,
        "calls for every role",
        '[message for message in read.ended if message.role == "assistant"]',
        "list(read.ended)",
    ),
    (
        HARMONY,
        "writes arguments as they are",
        "return json.dumps(json.loads(message.text))",
        "return message.text",
    ),
    (
        HARMONY,
        "writes letters as they are",
        "json.dumps(json.loads(message.text))",
        "json.dumps(json.loads(message.text), ensure_ascii=False)",
    ),
    (
        HARMONY,
        "reads code as JSON",
        'if message.content_type and "json" not in message.content_type:',
        "if False:",
    ),
    (
        HARMONY,
        "reads JSON where it is named alone",
        'if message.content_type and "json" not in message.content_type:',
        'if "json" not in (message.content_type or ""):',
    ),
    (
        HARMONY,
        "prefers a preamble",
        'content.get("final") or content.get("commentary")',
        'content.get("commentary") or content.get("final")',
    ),
    (
        HARMONY,
        "prefers an empty text",
        'content.get("final") or',
        'content["final"] if "final" in content else',
    ),
    (HARMONY, "hides preambles", ' or (self.channel == "commentary" and not self.recipient)', ""),
    (
        HARMONY,
        "takes calls for preambles",
        '(self.channel == "commentary" and not self.recipient)',
        'self.channel == "commentary"',
    ),
    # streams
    (
        HARMONY,
        "counts calls before the delta",
        "        parts = list(read.read(self._text(piece, token_ids)))\n",
        "        early = sum(message.calls for message in read.ended)\n"
        "        parts = list(read.read(self._text(piece, token_ids)))\n"
        "        read = Messages(read.ended[: early])\n",
    ),
    (
        HARMONY,
        "says nothing of half a character",
        "        if not parts and token_ids:\n",
        "        if False:\n",
    ),
    (
        HARMONY,
        "says something without tokens",
        "        if not parts and token_ids:\n",
        "        if not parts:\n",
    ),
    (
        HARMONY,
        "forgets the call that goes on",
        "following = index + (before is not None and before.calls)",
        "following = index",
    ),
    (
        HARMONY,
        "names a call that goes on",
        "recipient = before.recipient if before else None",
        "recipient = None",
    ),
    (
        HARMONY,
        "names every call",
        "                if message.recipient != recipient:\n",
        "                if before is not message:\n",
    ),
    (HARMONY, "gives a new call the old index", "                    at = following\n", ""),
    (HARMONY, "counts no new call", "                    following += 1\n", ""),
    (
        HARMONY,
        "gives a call's name alone",
        "                if text:\n",
        "                if False:\n",
    ),
    (
        HARMONY,
        "takes a call on the channel final for one",
        '            if message.channel == "final":\n',
        '            if message.channel == "final" and not message.calls:\n',
    ),
    (
        HARMONY,
        "shows a preamble to nobody in particular",
        'elif message.channel == "commentary" and message.recipient is None:',
        "elif message.shown:",
    ),
    (
        HARMONY,
        "takes a call for reasoning",
        "            elif message.calls:\n",
        '            elif message.calls and message.channel != "analysis":\n',
    ),
    (HARMONY, "always reasons aloud", "and self.include_reasoning", ""),
    (
        HARMONY,
        "says that it reasons nothing",
        "        if reasoning:\n            delta",
        '        if "analysis" in {m.channel for m, _ in parts if m}:\n            delta',
    ),
    (
        HARMONY,
        "says nothing for an empty text",
        "        delta: dict[str, Any] = {} if content is None",
        "        delta: dict[str, Any] = {} if not content",
    ),
    (
        HARMONY,
        "waits for a whole character",
        "known = text.rstrip(",
        'known = "" if text.endswith("\\ufffd") else text.rstrip(',
    ),
    (HARMONY, "waits for no whole character", 'text.rstrip("\\ufffd")', "text"),
    (HARMONY, "reads a character again", "piece = known[self.num_read :]", "piece = known"),
    (HARMONY, "holds what looks like a tag", "if self.vocab.keys() >= set(TAGS):", "if False:"),
    (HARMONY, "joins no parts of a message", "lambda part: id(part[0])", "id"),
    # chats
    (
        chat,
        "reads the text without tags",
        "harmony(\n                self.served.vocab, text_of=self.served.text_of",
        "harmony(\n                self.served.vocab, text_of=None",
    ),
    (chat, "reads half a character", 'text_of(token_ids).rstrip("\\ufffd")', "text_of(token_ids)"),
    (
        chat,
        "sends reasoning that is not wanted",
        "        if not request.include_reasoning:\n",
        "        if False:\n",
    ),
    (
        chat,
        "reads calls without their parser",
        "if (parser := self.family()) is None:",
        "if (parser := self.served.harmony()) is None:",
    ),
    (
        chat,
        "cuts calls that were not wanted",
        "reasoning, content, calls = self._harmony(choice.token_ids)",
        "reasoning, content, calls = self._harmony(choice.token_ids); "
        "calls = calls[: None if request.parallel_tool_calls else 1]",
    ),
    (
        chat,
        "sends calls that were not wanted",
        "if request.parallel_tool_calls is False and message.get",
        "if False and message.get",
    ),
    (
        chat,
        "calls a named tool a stop",
        "named_tool is not None and self.served.harmony is None",
        "named_tool is not None",
    ),
    (
        chat,
        "stops at a call",
        '            reason = "tool_calls" if calls else reason\n',
        "            pass\n",
    ),
    (
        chat,
        "takes required for called",
        "        if self.served.harmony is not None:\n            reason = ",
        "        if self.served.harmony is not None and calls:\n            reason = ",
    ),
    (
        chat,
        "reads a constraint's JSON",
        "        if (harmony := self.served.harmony) is not None:",
        "        if (harmony := self.served.harmony) is not None and not self.forced:",
    ),
)

WRONG_PROMPTS: tuple[Wrong, ...] = (
    (PROMPT, "keeps reasoning of earlier answers", "if i > last or", "if True or"),
    (PROMPT, "keeps no reasoning", "if i > last or", "if False or"),
    (PROMPT, "drops all before the last answer", 'or m.channel != "analysis"', ""),
    (PROMPT, "drops reasoning before the first answer", "finals[-1] if", "finals[0] if"),
    (PROMPT, "says nobody is next", "{START}assistant", ""),
    (PROMPT, "ends a call as any message", '"<|call|>" if', '"<|end|>" if'),
    (PROMPT, "ends a result as a call", 'message.role == "assistant" and to', "to"),
    (PROMPT, "names a recipient behind the channel", "{to}{channel}{kind}", "{channel}{to}{kind}"),
    (
        PROMPT,
        "constrains a call's type",
        '", "json", arguments',
        '", "<|constrain|>json", arguments',
    ),
    (PROMPT, "thinks little", "or 'medium'", "or 'low'"),
    (PROMPT, "takes any effort", "if effort not in (None, *EFFORTS):", "if False:"),
    (
        PROMPT,
        "never says where calls go",
        "    if functions:\n        channels",
        "    if False:\n        channels",
    ),
    (
        PROMPT,
        "says always where calls go",
        "    if functions:\n        channels",
        "    if True:\n        channels",
    ),
    (PROMPT, "names no function of a result", 'names.get(message.get("tool_call_id"), "")', '""'),
    (
        PROMPT,
        "says a preamble after its reasoning",
        "    if calls and text:\n"
        '        yield Message(role, "commentary", None, None, text)\n'
        '    if role == "assistant" and reasoning:\n'
        '        yield Message(role, "analysis", None, None, reasoning)\n',
        '    if role == "assistant" and reasoning:\n'
        '        yield Message(role, "analysis", None, None, reasoning)\n'
        "    if calls and text:\n"
        '        yield Message(role, "commentary", None, None, text)\n',
    ),
    (PROMPT, "says an empty preamble", "if calls and text:", "if calls:"),
    (PROMPT, "says an empty answer", "elif not calls and parts and parts[0]:", "elif not calls:"),
    (PROMPT, "says an answer that begins empty", "and parts[0]:", "and text:"),
    (PROMPT, "answers beside calls", "elif not calls and parts", "elif parts"),
    (
        PROMPT,
        "leaves out an empty message",
        '    if role != "assistant":\n',
        '    if role != "assistant" and text:\n',
    ),
    (PROMPT, "joins parts by lines", 'text = "".join(parts)', 'text = "\\n".join(parts)'),
    (PROMPT, "writes a tool without a description", "if description is None:", "if False:"),
    (
        PROMPT,
        "says a description in one line",
        "for line in _lines(description)]",
        "for line in [description]]",
    ),
    (
        PROMPT,
        "splits lines as Python does",
        'text.removesuffix("\\n").split("\\n") if text else []',
        "text.splitlines()",
    ),
    (PROMPT, "keeps the last line's end", '.removesuffix("\\n").split', ".split"),
    (PROMPT, "keeps a carriage return", ".removesuffix(chr(13))", ""),
    (
        PROMPT,
        "gives no argument an object",
        'if schema is None else f"_:',
        'if not schema else f"_:',
    ),
    (PROMPT, "knows integers", '"integer": "number"', '"integer": "integer"'),
    (PROMPT, "knows integers among types", '"number" if each == "integer" else each', "each"),
    (PROMPT, "knows no choice of types", "if isinstance(kind, list) and (", "if False and ("),
    (PROMPT, "writes an array as a generic", '[]" if "items" in schema', '[]" if False'),
    (
        PROMPT,
        "writes every value of an enum",
        "for value in _enum(schema) if isinstance(value, str)]",
        "for value in _enum(schema)]",
    ),
    (
        PROMPT,
        "writes nothing for an odd enum",
        '" | ".join(values) or "string"',
        '" | ".join(values)',
    ),
    (
        PROMPT,
        "indents what an object holds",
        "return _object(schema, indent)",
        'return _object(schema, indent + "    ")',
    ),
    (PROMPT, "indents nothing", "_nullable(about, indent + '    ')", "_nullable(about, indent)"),
    (
        PROMPT,
        "says nothing of an object",
        '_comment(schema.get("description"), indent) + "{\\n"',
        '"{\\n"',
    ),
    (
        PROMPT,
        "says no title",
        'if title := _comment(about.get("title"), indent):',
        'if title := "":',
    ),
    (
        PROMPT,
        "says nothing of a property",
        'text += _comment(about.get("description"), indent)',
        "pass",
    ),
    (
        PROMPT,
        "announces no examples",
        'isinstance(examples := about.get("examples"), list) and examples',
        'isinstance(examples := about.get("examples"), list)',
    ),
    (
        PROMPT,
        "gives every example",
        "for e in examples if isinstance(e, str))",
        "for e in examples)",
    ),
    (PROMPT, "knows no null", 'if schema.get("nullable") is True and', "if False and"),
    (PROMPT, "says null twice", ' and "null" not in found', ""),
    (PROMPT, "wants all properties", 'key in required else "?"', 'key in required else ""'),
    (
        PROMPT,
        "reads a text as a list",
        "isinstance(required, list) and key in required",
        "required and key in required",
    ),
    (PROMPT, "knows no default", '    if "default" not in schema:\n', "    if True:\n"),
    (
        PROMPT,
        "takes null for no default",
        'if "default" not in schema:',
        'if schema.get("default") is None:',
    ),
    (PROMPT, "quotes every default", "    elif not _enum(schema):\n", "    else:\n"),
    (PROMPT, "quotes no default", "    elif not _enum(schema):\n", "    elif False:\n"),
    (PROMPT, "writes JSON with blanks", ', separators=(",", ":"))', ")"),
    (
        PROMPT,
        "knows no types to choose from",
        'isinstance(variants := schema.get("oneOf"), list)',
        "variants := False",
    ),
    (
        PROMPT,
        "chooses in one line",
        'f"\\n{indent} | {_variant(each',
        'f"{indent} | {_variant(each',
    ),
    (PROMPT, "quotes no enum's value of a type", ", bare=False)", ")"),
    (PROMPT, "quotes an enum's value", "(_enum(schema) and not bare)", "_enum(schema)"),
    (PROMPT, "says a choice twice", '        if "oneOf" not in about:\n', "        if True:\n"),
    (PROMPT, "chooses behind a property", 'if isinstance(about.get("oneOf"), list):', "if False:"),
    (
        PROMPT,
        "gives a default beside what is no choice",
        '"" if "oneOf" in about else "".join(f" // {note}"',
        '"".join(f" // {note}"',
    ),
    (PROMPT, "says above what the first says", '"" if said == first else _comment', "_comment"),
    (PROMPT, "gives a choice no default", "for note in _default(schema))\n", "for note in ())\n"),
    (PROMPT, "ends no choice", 'return f"{text}{indent},\\n"', "return text"),
    (PROMPT, "says what the first is", "hides = number == 0 and bool(above)", "hides = False"),
    (
        PROMPT,
        "never says what the first is",
        "hides = number == 0 and bool(above)",
        "hides = number == 0",
    ),
    (PROMPT, "says again what was said", " and own != said and", " and"),
    (PROMPT, "indents a type as a property's", 'indent + "   ")', 'indent + "    ")'),
    (PROMPT, "says nothing behind a type", "if notes else found", "if False else found"),
    (PROMPT, "gives a type no default", "    notes += _default(about, bare)\n", ""),
    (PROMPT, "says one thing a comment", "' '.join(notes)", "' // '.join(notes)"),
)
