"""Small tokenizers and chat templates in the manner of the families that are served."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HFTokenizer
from transformers import PreTrainedTokenizerFast

from phase0_request.tokenizer import BUNDLED, Tokenizer

# Thoughts of earlier answers are cut out of the history; results of tools come as the user's.
QWEN3 = """\
{%- set last = namespace(index=messages|length - 1, found=false) -%}
{%- for message in messages[::-1] -%}
  {%- if not last.found and message.role == 'user' and message.content is string
      and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) -%}
    {%- set last.found = true -%}{%- set last.index = messages|length - loop.index -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set content = message.content -%}
  {%- if message.role == 'assistant' -%}
    {%- set thought = '' -%}
    {%- if '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if loop.index0 > last.index -%}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}{%- endif -%}
    {{- content.lstrip('\\n') + '<|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
"""

# The system message is taken out of the list; all contents are trimmed; calls of tools have a form of their own.
LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}
  {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nKnowledge: December 2023\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
  {%- if message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message %}
    {{- raise_exception("This model only supports single tool-calls at once!") }}
  {%- endif %}
  {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Turns must alternate; the system message becomes the beginning of the last user's.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('conversation roles must alternate user and assistant') }}
  {%- endif %}
  {%- if message.role == 'user' %}
    {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
    {%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
  {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}
"""


def special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_level(control: tuple[str, ...], plain: tuple[str, ...] = ()) -> HFTokenizer:
    """The bundled vocabulary with more added tokens."""
    backend = HFTokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    backend.add_special_tokens(special(*control))
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])
    return backend


def qwen3() -> HFTokenizer:
    backend = byte_level((), ("<think>", "</think>", "<tool_call>"))
    backend.normalizer = normalizers.NFC()
    return backend


def llama() -> HFTokenizer:
    control = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    backend = byte_level((*control, *(f"<|reserved_special_token_{number}|>" for number in range(250))))
    begin = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = processors.TemplateProcessing(
        "<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    return backend


def mistral() -> HFTokenizer:
    """SentencePiece's manner: a mark for a space, put in front of the first piece of a text, and bytes as <0xAB>."""
    words = HFTokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    words.train_from_iterator(["What is a page of the cache? Sixteen tokens. Be brief and kind."] * 4, trainer)
    learnt = json.loads(words.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [tuple(pair) for pair in learnt["merges"]]
    backend = HFTokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = words.pre_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(special("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
    return backend


FAMILIES: dict[str, tuple[Any, str, dict[str, str]]] = {
    "qwen3": (qwen3, QWEN3, {"eos_token": "<|im_end|>"}),
    "llama": (llama, LLAMA, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "mistral": (mistral, MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}),
}


# Calls of tools and their results, in a form that serves all families: each has its own marks around a message.
WITH_TOOLS = """\
{{- bos_token if bos_token is defined }}
{%- if tools %}{{- BEGIN + 'tools ' + tools | tojson + END }}{%- endif %}
{%- for document in documents or [] %}{{- document.title | trim + ': ' + document.text + END }}{%- endfor %}
{%- for message in messages %}
{{- BEGIN + message.role + ' ' + (message.name or '') + ' ' + message.content | trim }}
{%- for call in message.tool_calls or [] %}
{{- '[' + call.function.name + '] ' + call.function.arguments | tojson }}
{%- for name, value in call.function.arguments | items %}{{- name | upper + '=' + value | string }}{%- endfor %}
{%- endfor %}
{{- END }}
{%- endfor %}
{%- if language is defined %}{{- language }}{%- endif %}
{%- if add_generation_prompt %}{{- BEGIN + 'assistant' }}{%- endif %}
"""
MARKS = {
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "llama": ("<|start_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
}


@cache
def family(name: str, tools: bool = False) -> tuple[Tokenizer, Any]:
    """This project's tokenizer and transformers' over the same files; with `tools`, over WITH_TOOLS."""
    make, template, named = FAMILIES[name]
    if tools:
        begin, end = MARKS[name]
        template = WITH_TOOLS.replace("BEGIN", f"'{begin}'").replace("END", f"'{end}'")
    reference = PreTrainedTokenizerFast(tokenizer_object=make(), **named)
    reference.chat_template = template
    return Tokenizer(make(), (), template, named), reference
