"""Formats of strings as regular expressions: the names that upstream lets through for xgrammar.

Promises: what matches is of the format by its RFC; where a format is not a regular language the
expression holds a part of it. The names are those of
`vllm/v1/structured_output/backend_xgrammar.py:203` `STRING_SUPPORTED_FORMATS`.
"""

from __future__ import annotations

_HOUR_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = f"{_HOUR_MINUTE}:[0-5][0-9](\\.[0-9]+)?(Z|[+\\-]{_HOUR_MINUTE})"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?\\^_`{|}~\\-]+"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H16 = "[0-9A-Fa-f]{1,4}"
_CHAR = "([A-Za-z0-9\\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_PATH = f"(/{_CHAR}*)*"
_TAIL = f"(\\?({_CHAR}|[/?])*)?(#({_CHAR}|[/?])*)?"
_HOST = "([A-Za-z0-9\\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*(:[0-9]*)?"
_POINTER = "(/([^~/]|~[01])*)*"
_NAME = "([A-Za-z0-9_]|%[0-9A-Fa-f]{2})(\\.?([A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(\\*|:[1-9][0-9]{0,3})?"

FORMATS = {
    "email": f"{_ATOM}(\\.{_ATOM})*@{_LABEL}(\\.{_LABEL})*",
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": (
        "P(([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
        "(T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))?"
        "|T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)|[0-9]+W)"
    ),
    "ipv4": f"({_BYTE}\\.){{3}}{_BYTE}",
    "ipv6": (
        f"({_H16}:){{7}}{_H16}|::({_H16}(:{_H16}){{0,6}})?|({_H16}:){{1,6}}:{_H16}"
        f"|({_H16}:){{1,7}}:"
    ),
    "hostname": f"{_LABEL}(\\.{_LABEL})*",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": f"[A-Za-z][A-Za-z0-9+.\\-]*:(//{_HOST}{_PATH}|/?({_CHAR}+{_PATH})?){_TAIL}",
    "uri-reference": f"(//{_HOST}{_PATH}|{_PATH}|{_CHAR}+{_PATH}){_TAIL}".replace(
        f"|{_CHAR}+{_PATH}", f"|[A-Za-z0-9\\-._~]+{_PATH}"
    ),
    "uri-template": (
        "([A-Za-z0-9\\-._~!$&()*+,;=:@/?#]|%[0-9A-Fa-f]{2}"
        f"|\\{{[+#./;?&]?{_NAME}(,{_NAME})*\\}})*"
    ),
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
}
