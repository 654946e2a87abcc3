"""Tool formats: how each model family writes the calls of tools, as data for the grammar and the reader of answers."""

import re
from dataclasses import dataclass, replace

_TOOLS = re.compile(r"\b(?:xml_)?tools\b")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning is between `begin` and `end`. `after` follows it, and `content` precedes the content."""

    begin: str
    end: str
    after: str = ""
    content: str = ""


THINK = Reasoning("<think>", "</think>")  # as Qwen3 and DeepSeek-R1 write it
MESSAGES = Reasoning(
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
)  # of gpt-oss
REASONINGS = {"deepseek_r1": THINK, "qwen3": THINK, "openai_gptoss": MESSAGES}


def reasoning_of(template: str, name: str | None) -> Reasoning | None:
    """How a model writes its reasoning, by this name or by its chat template; None if it does not."""
    if name is not None:
        return REASONINGS.get(name)
    return MESSAGES if _is_harmony(template) else THINK if THINK.end in template else None


def _is_harmony(template: str) -> bool:
    return "<|channel|>" in template and "<|start|>" in template


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
    opening: str = ""  # a pattern that may come before the calls, and those that may come after them
    closing: tuple[str, ...] = ()
    separator: str = "(?!)"  # a pattern between calls behind one marker
    named: bool = False  # a call may also be a name and an object
    written: str = "json"  # or python or elements: how the model writes calls by itself. A grammar has it write JSON
    several: bool = True  # an answer may have more than one call
    id_length: int | None = None  # of the id of a call, where the chat template checks it


HERMES = ToolFormat(
    '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    between="\n",
    markers=("<tool_call>", "</tool_call>"),
    closing=("</tool_call>",),
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
    closing=(r"\]",),
    separator=",",
    named=True,
    id_length=9,
)
MISTRAL_ARGS = replace(MISTRAL, call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", begin="", between="", end="")
QWEN_CODER = replace(HERMES, written="elements")  # <function=NAME> <parameter=city> Bern </parameter> </function>
LISTED = ToolFormat(  # of Granite 3 and Phi 4 mini
    '{"name": "NAME", "arguments": ARGUMENTS}',
    between=", ",
    markers=("<|tool_call|>", "<|/tool_call|>"),
    begin="<|tool_call|>[",
    end="]",
    opening=r"\[",
    closing=(r"\]", r"<\|/tool_call\|>"),
    separator=",",
)
LFM2 = replace(
    LISTED,
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    begin="<|tool_call_start|>[",
    end="]<|tool_call_end|>",
    closing=(r"\]", r"<\|tool_call_end\|>"),
    written="python",
)
OLMO3 = ToolFormat(
    HERMES.call.split("\n")[1],
    between="\n",
    markers=("<function_calls>", "</function_calls>"),
    begin="<function_calls>\n",
    end="\n</function_calls>",
    closing=("</function_calls>",),
    separator=r"(?=[\w{])",
    written="python",
)
HARMONY = ToolFormat(
    "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
    between="",
    markers=("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"),
    several=False,  # it ends with its call
)
BY_NAME = {
    "hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "qwen3_coder": QWEN_CODER, "granite": LISTED,
    "phi4_mini_json": LISTED, "lfm2": LFM2, "olmo3": OLMO3, "openai": HARMONY,
}  # fmt: skip
_BY_MARKER = {  # the first one in a chat template; GLM's format is not known
    "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json", "<function=": "qwen3_coder", "<arg_key>": None,
    "<tool_call>": "hermes", "<|tool_list_start|>": "lfm2", "<|tool_call_start|>": "lfm2",
    "<function_calls>": "olmo3", "<|tool_call|>": "granite",
}  # fmt: skip


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
    if _is_harmony(template):
        return "openai"
    for marker, name in _BY_MARKER.items():
        if marker in template:
            return name
    return "llama3_json" if "<|start_header_id|>" in template and '"parameters": ' in template else None
