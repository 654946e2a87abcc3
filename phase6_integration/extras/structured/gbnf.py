r"""GBNF, llama.cpp's notation of grammars: what llguidance's converter to Lark changes is written in another way first.

"\u00e9a1" -> "éa1"    [\-a&&] -> [\x2da\x26\x26]    . -> [any character, the end of a line too]
"""

import re

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_PARTS = re.compile(
    r'#[^\r\n]*|"(?P<text>(?:\\.|[^"\\])*+)"|\[(?P<kind>\^?+)(?P<characters>(?:\\.|[^\]\\])*+)\]|(?P<any>\.)|["\[].*',
    re.DOTALL,
)
_CHARACTER = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|."
_CHARACTERS = re.compile(_CHARACTER, re.DOTALL)
_RANGES = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {itself: itself for itself in '\\"[]-'}


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is GBNF. If not, it is Lark, in which no rule has ::=."""
    return _RULE.search(grammar) is not None


def plain(grammar: str) -> str:
    """A grammar in GBNF, with its characters written so that they mean the same in Lark. ValueError for an escape
    that GBNF does not have."""
    return _PARTS.sub(_plain, grammar)


def _plain(match: re.Match[str]) -> str:
    match match.lastgroup:
        case "text":
            return f'"{_CHARACTERS.sub(_written, match["text"])}"'
        case "characters":
            ranges = _RANGES.findall(match["characters"])
            return f"[{match['kind']}{''.join('-'.join(map(_safe, filter(None, ends))) for ends in ranges)}]"
        case "any":
            return "[\\x00-\U0010ffff]"
    return match[0]  # a comment, or what has no end


def _written(match: re.Match[str]) -> str:
    return _safe(match[0])


def _safe(character: str) -> str:
    """A character of GBNF, possibly an escape, written so that it has no other meaning in a text or a class of Lark."""
    kind = character[1:2]
    if len(character) > 2:
        code = int(character[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise ValueError(f"{character} is no character")
        character = chr(code)
    elif kind:
        if kind not in _ESCAPES:
            raise ValueError(f"{character} is no escape of GBNF")
        character = _ESCAPES[kind]
    return character if character.isalnum() or character == " " or character > "\x7f" else f"\\x{ord(character):02x}"
