"""Tool formats: how each model family writes the calls of tools, as data for the grammar and the reader of answers."""

import re
from dataclasses import dataclass, replace

_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """An answer that has to call is `begin`, calls with `between` between two, and `end`. In `call`, NAME and ARGUMENTS
    stand for those of a function. The fields from `bare` on say what else is read."""

    call: str
    between: str
    markers: tuple[str, ...]  # that have to be in the text, also where they are control tokens. The first begins calls
    begin: str = ""
    end: str = ""
    bare: bool = False  # an answer may also begin with a call, without the marker
    opening: str = ""  # a pattern that the calls may be within, with `closing`
    closing: str = ""
    separator: str = "(?!)"  # a pattern between calls behind one marker
    named: bool = False  # a call may also be a name and an object
    id_length: int | None = None  # of the id of a call, where the chat template checks it


HERMES = ToolFormat(
    '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    between="\n",
    markers=("<tool_call>", "</tool_call>"),
    closing="</tool_call>",
)
LLAMA = ToolFormat(
    '{"name": "NAME", "parameters": ARGUMENTS}',
    between="; ",
    markers=("<|python_tag|>",),
    bare=True,
    separator=r"[;,]|(?=\{)",
)
MISTRAL = ToolFormat(
    '{"name": "NAME", "arguments": ARGUMENTS}',
    between=", ",
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    begin="[TOOL_CALLS][",
    end="]",
    opening=r"\[",
    closing=r"\]",
    separator=",",
    named=True,
    id_length=9,
)
MISTRAL_ARGS = replace(MISTRAL, call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", begin="", between="", end="")
BY_NAME = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}


def uses_tools(template: str) -> bool:
    """Whether a chat template tells the model about tools."""
    return _TOOLS.search(template) is not None


def tool_format(template: str, name: str | None) -> ToolFormat | None:
    """The format of this name, or else of the model family of this chat template, if it is known."""
    name = _family(template) if name is None else name
    if name == "mistral" and "[ARGS]" in template:
        return MISTRAL_ARGS
    return None if name is None else BY_NAME.get(name)


def _family(template: str) -> str | None:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:  # what Qwen3-Coder and GLM put into it is not JSON
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters": ' in template):
        return "llama3_json"
    return None
