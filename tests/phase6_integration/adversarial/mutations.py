"""Strategies of hypothesis that damage a JSON document."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 64), 1 << 64),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../x", "F32", "BF16", [], {}, [[]], 1 << 31, 1e308, "\ud800", "a" * 100]),
    st.lists(st.integers(-4, 1 << 40), max_size=4),
)


def edited(document: Any, edits: list[tuple[int, int, Any]]) -> Any:
    """A copy of a JSON document in which values are replaced, removed or added: anywhere in it."""
    document = json.loads(json.dumps(document))
    for where, what, given in edits:
        value = copy.deepcopy(given)  # else a list could be put into itself
        inner = [document]
        for one in inner:
            children = one.values() if isinstance(one, dict) else one
            inner += [child for child in children if isinstance(child, dict | list)]
        target = inner[where % len(inner)]
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        if not keys or what % 8 == 0:
            target.update({str(value)[:20]: value}) if isinstance(target, dict) else target.append(value)
        elif what % 8 == 1:
            del target[keys[what // 8 % len(keys)]]
        else:
            target[keys[what // 8 % len(keys)]] = value
    return document


def edits(document: Any) -> st.SearchStrategy[bytes]:
    """The document as a file: edited as JSON, or its bytes changed, or cut."""
    whole = json.dumps(document).encode()
    numbers = st.integers(0, 1 << 12)
    as_json = st.lists(st.tuples(numbers, numbers, ODD), min_size=1, max_size=3).map(
        lambda changes: json.dumps(edited(document, changes)).encode()
    )
    as_bytes = st.tuples(numbers, st.binary(max_size=4)).map(
        lambda change: whole[: change[0] % len(whole)] + change[1] + whole[change[0] % len(whole) + len(change[1]) :]
    )
    return st.one_of(as_json, as_bytes, numbers.map(lambda cut: whole[: cut % len(whole)]))
