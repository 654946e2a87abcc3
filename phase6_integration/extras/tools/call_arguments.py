"""Arguments of calls that are not written in JSON, as JSON."""

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

OF_JSON = {"true": True, "false": False, "null": None}  # which models write in Python, too


class _Constants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(OF_JSON[node.id]) if node.id in OF_JSON else node


def of_python(arguments: str) -> str:
    """Those of a call in Python, with its parentheses. ValueError if they are not names with literals."""
    try:
        with warnings.catch_warnings(action="ignore"):  # such as of an escape that does not exist
            call = ast.parse(f"f{arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("not a call with names")
        values = {word.arg: ast.literal_eval(_Constants().visit(word.value)) for word in call.keywords}
        if None in values:
            raise ValueError("not a call with names")
        return text_of(values)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def text_of(values: Mapping[Any, Any]) -> str:
    """Arguments in JSON. ValueError if JSON or UTF-8 cannot write them: infinity, or half of a surrogate pair."""
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    text.encode()
    return text


def of_text(text: str, schema: object) -> Any:
    """The value of an argument that is written as text: a string if its schema has strings, or else JSON, if it is."""
    kinds = _kinds(schema)
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not in JSON")


def _kinds(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type", [])
    kinds = {str(one) for one in (kind if isinstance(kind, list) else [kind])}
    listed = schema.get("enum")
    if any(isinstance(one, str) for one in (*(listed if isinstance(listed, list) else ()), schema.get("const"))):
        kinds.add("string")
    for field in ("anyOf", "oneOf"):
        several = schema.get(field)
        for one in several if isinstance(several, list) else ():
            kinds |= {str(one["type"])} if isinstance(one, Mapping) and "type" in one else set()
    return kinds
