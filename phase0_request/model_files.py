"""What a model directory says beside its vocabulary: how the model ends, how it chats, what its tokens are called."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_TEMPLATE_BYTES = 1 << 18
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def eos_ids(directory: Path, token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """Every token that ends an answer. Models name several, in up to three files; all of them count."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        given = _read(directory / name).get("eos_token_id")
        ids.update(given if isinstance(given, list) else [] if given is None else [given])
    eos = named_tokens(directory).get("eos_token")
    named = None if eos is None else token_to_id(eos)
    return frozenset(ids if named is None else ids | {named})


def chat_template(directory: Path) -> str | None:
    """The model's chat template: a file of its own, or an entry of the tokenizer's configuration."""
    file = directory / "chat_template.jinja"
    template = (
        file.read_text("utf-8") if file.is_file() else _read(directory / "tokenizer_config.json").get("chat_template")
    )
    if isinstance(template, list):  # several, by name
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if template is not None and len(template.encode()) > MAX_TEMPLATE_BYTES:
        raise ValueError(
            f"the chat template has {len(template.encode())} bytes; at most {MAX_TEMPLATE_BYTES} are allowed"
        )
    return template


def named_tokens(directory: Path) -> dict[str, str]:
    """The special tokens by the names that templates use for them."""
    config = _read(directory / "tokenizer_config.json")
    values = {name: config.get(name) for name in NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no such file, for all of these files are optional."""
    if not file.is_file():
        return {}
    content = json.loads(file.read_text("utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} must hold a JSON object, got {type(content).__name__}")
    return content
