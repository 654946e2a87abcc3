"""Tool formats: how each model family writes the calls of tools."""

import re
from dataclasses import dataclass

from phase6_integration.wings.tools.tool_parsers import HermesParser, LlamaParser, MistralParser, ToolParser

_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What a model writes; NAME and ARGUMENTS stand for those of a function."""

    parser: type[ToolParser]
    call: str
    between: str  # calls
    begin: str = ""
    end: str = ""
    id_length: int | None = None  # of the id of a call, where the chat template checks it


HERMES = ToolFormat(HermesParser, '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', "\n")
LLAMA = ToolFormat(LlamaParser, '{"name": "NAME", "parameters": ARGUMENTS}', "; ")
MISTRAL = ToolFormat(
    MistralParser, '{"name": "NAME", "arguments": ARGUMENTS}', ", ", begin="[TOOL_CALLS][", end="]", id_length=9
)
MISTRAL_ARGS = ToolFormat(MistralParser, "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "", id_length=9)
BY_NAME = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}


def uses_tools(template: str) -> bool:
    """Whether a chat template tells the model of tools."""
    return _TOOLS.search(template) is not None


def tool_format(template: str, name: str | None) -> ToolFormat | None:
    """The format of this name, else of the family that this chat template is of, if it is known."""
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
