"""Random JSON schemas, in the shapes that clients send, and of any size."""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "kind", "size", "tags", "owner", "price", "note", "when", "next", "a b", "naïve", 'a"b', "x/y")
PATTERNS = ("^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{3,5}$", "^(yes|no|maybe)$", "^#[0-9a-f]{6}$", r"^\d{1,3}(\.\d{1,3}){3}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "duration")
VALUES: tuple[Any, ...] = (
    *(0, -7, 2.5, True, None, "red", "dark blue", 'a "quoted" word', "line\nbreak"),
    *([], [1, "two"], {"a": {"b": 3}}),
)


class Generator:
    """Draws schemas that some value meets. The same seed draws the same ones."""

    def __init__(self, seed: int, depth: int = 3) -> None:
        self.random = Random(seed)
        self.depth = depth

    def schema(self) -> Schema:
        """A whole schema: mostly of an object, and sometimes with definitions, of which one refers to itself."""
        roll = self.random.random()
        if roll < 0.1:
            return self.recursive()
        if roll < 0.2:
            leaf = self.any(self.depth - 1)
            names = self.names()
            whole = self.object_of({name: {"$ref": "#/$defs/leaf"} for name in names})
            return {"$defs": {"leaf": leaf}, **whole}
        return self.object(self.depth) if roll < 0.8 else self.any(self.depth)

    def any(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            *(self.string, self.integer, self.number, self.enum, self.one_of_types, lambda: {"type": "boolean"}),
            *(lambda: {"type": "null"}, lambda: {"const": self.random.choice(VALUES)}),
        ]
        if depth <= 0:
            return self.random.choice(leaves)()
        deeper = (self.object, self.object, self.array, self.tuple, self.any_of, self.all_of, self.tagged)
        return self.random.choice([*leaves, *(lambda make=make: make(depth) for make in deeper)])()

    def names(self) -> list[str]:
        return self.random.sample(NAMES, self.random.randint(1, 5))

    def string(self) -> Schema:
        low = self.random.randint(0, 5)
        kinds: list[Schema] = [
            {"maxLength": low + self.random.randint(1, 20)},
            {"minLength": low, "maxLength": low + self.random.randint(0, 20)},
            {"pattern": self.random.choice(PATTERNS)},
            {"format": self.random.choice(FORMATS)},
        ]
        return {"type": "string", **self.random.choice(kinds)}

    def integer(self) -> Schema:
        low = self.random.randint(-1000, 1000)
        step = self.random.choice((2, 5, 10))
        kinds: list[Schema] = [
            {"minimum": low, "maximum": low + self.random.randint(0, 500)},
            {"exclusiveMinimum": low, "exclusiveMaximum": low + self.random.randint(2, 500)},
            {"multipleOf": step, "minimum": step * low, "maximum": step * (low + 9)},
        ]
        return {"type": "integer", **self.random.choice(kinds)}

    def number(self) -> Schema:
        low = self.random.randint(-100, 100) / 4
        return {"type": "number", "minimum": low, "maximum": low + self.random.randint(1, 40) / 8}

    def enum(self) -> Schema:
        return {"enum": self.random.sample(VALUES, self.random.randint(1, 5))}

    def one_of_types(self) -> Schema:
        return {"type": self.random.sample(("boolean", "null"), 2)}

    def array(self, depth: int) -> Schema:
        low, items = self.random.randint(0, 2), self.any(depth - 1)
        high = low + self.random.randint(0, 3)
        return {"type": "array", "items": items, "minItems": low, "maxItems": high}

    def tuple(self, depth: int) -> Schema:
        first = [self.any(depth - 1) for _ in range(self.random.randint(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}

    def object(self, depth: int) -> Schema:
        return self.object_of({name: self.any(depth - 1) for name in self.names()})

    def object_of(self, properties: dict[str, Schema]) -> Schema:
        """Without other properties; or with them, of which there may be any number."""
        required = self.random.sample([*properties], self.random.randint(0, len(properties)))
        more: Any = {"type": "boolean"} if self.random.random() < 0.1 else False
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth - 1) for _ in range(self.random.randint(1, 3))]}

    def all_of(self, depth: int) -> Schema:
        """Two halves of an object."""
        names = self.names()
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        return {"allOf": [{"type": "object", "properties": {n: self.any(depth - 2) for n in half}} for half in halves]}

    def tagged(self, depth: int) -> Schema:
        """A union as pydantic writes it: each object has a tag of its own."""
        kinds = [self.object(depth - 1) for _ in range(self.random.randint(2, 3))]
        for number, kind in enumerate(kinds):
            kind["properties"] = {"tag": {"const": f"kind {number}"}, **kind["properties"]}
            kind["required"] = ["tag", *kind["required"]]
        return {"oneOf": kinds}

    def recursive(self) -> Schema:
        """A tree."""
        node = self.object_of({"value": self.any(1)})
        node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
