"""The grammar that an answer must follow: what makes it, and what the answer then reports about it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from phase0_request.params import GRAMMAR_FAILED, GRAMMAR_REFUSED
from phase0_request.request import FinishReason
from phase6_integration.api.additions import Addition, Asked
from phase6_integration.api.errors import RequestError, unservable
from phase6_integration.extras.fields.request_fields import StructuredFields


class Grammar(NamedTuple):
    text: str
    notes: tuple[str, ...] = ()  # of its JSON schemas, what is not enforced


class GrammarMaker(Protocol):
    """Structured output, as other extras use it: `app.state.grammars`."""

    def field(self, body: StructuredFields) -> str | None:
        """The path of the field that gives a constraint, if one does."""
        ...

    def check(self, grammar: str, param: str) -> str:
        """The same grammar. A RequestError about `param` if the engine cannot take it."""
        ...

    def of_schema(self, schema: Mapping[str, Any], body: StructuredFields, lenient: bool) -> Grammar:
        """The grammar of a JSON schema, for the arguments of a tool."""
        ...


class Constrained(Addition):
    """An answer that follows a grammar."""

    def __init__(self, grammar: Grammar, fields: Sequence[str]) -> None:
        self.grammar, self.excluding = grammar, fields

    def warnings(self, reasons: Sequence[str]) -> Iterable[str]:
        if self.grammar.notes:
            yield f"not enforced: {', '.join(self.grammar.notes)}"
        if FinishReason.LENGTH.value in reasons:
            yield f"cut at its length: the answer does not meet {' and '.join(self.excluding)} to the end"

    def failure(self, error: str, so_far: str) -> RequestError | None:
        param, name = self.excluding[0], " and ".join(self.excluding)
        if error.startswith(GRAMMAR_REFUSED):
            return unservable(param, f"{name}: {error.removeprefix(f'{GRAMMAR_REFUSED}: ')}")
        if error.startswith(GRAMMAR_FAILED):
            message = f"{name}: {so_far} it takes too much time or memory to be followed further"
            return unservable(param, message, "grammar_too_complex")
        return None


def constrain(asked: Asked, grammar: Grammar | None, fields: Sequence[str]) -> None:
    """Make the answer follow a grammar made from these fields, instead of the previous one. None allows any text."""
    asked.additions[:] = [addition for addition in asked.additions if not isinstance(addition, Constrained)]
    asked.params["grammar"] = grammar and grammar.text
    if grammar is not None:
        own = [asked.own_fields.get(name.split(".")[0], name) for name in fields]
        asked.additions.append(Constrained(grammar, own))


def grammar_of(asked: Asked) -> Grammar | None:
    """The grammar that the answer follows so far."""
    return next((one.grammar for one in asked.additions if isinstance(one, Constrained)), None)
