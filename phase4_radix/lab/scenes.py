"""The scenes of the demo: which requests arrive together, and a caption."""

from dataclasses import dataclass

INSTRUCTION = "Answer in one short sentence.\n"


@dataclass(frozen=True, slots=True)
class Ask:
    """A conversation of questions from the corpus. All but the last have been answered."""

    questions: tuple[str, ...]
    instruction: str = INSTRUCTION
    salt: str = ""
    answer: str = ""  # instead of the one in the corpus


@dataclass(frozen=True, slots=True)
class Scene:
    """Requests that arrive together, and a caption."""

    caption: str
    asks: tuple[Ask, ...]


SCENES = (
    Scene(
        "One request. Its pages enter the tree once they are full and computed.",
        (Ask(("What is a desert?",)),),
    ),
    Scene(
        "Two requests share its prefix. Its node is split where they diverge.",
        (Ask(("What is a comet?",)), Ask(("What is a star?",))),
    ),
    Scene(
        "The next turn of the first conversation. Its own answer is cached, too.",
        (Ask(("What is a desert?", "What is an island?")),),
    ),
    Scene(
        "The same prompt three times at once. All compute it; duplicate pages are freed.",
        tuple(
            Ask(("What is a glacier?",), answer=answer)
            for answer in (
                "A river of ice that flows slowly downhill under its own weight.",
                "Ice that forms from packed snow and never melts away.",
                "It is ice on the move, so thick and so heavy that it carves valleys.",
            )
        ),
    ),
    Scene(
        "The same prompt with another salt. It shares nothing.",
        (Ask(("What is a desert?",), salt="tenant"),),
    ),
    Scene(
        "Unrelated prompts need pages. The least recently used leaves are evicted.",
        (
            Ask(("How does a rainbow work?",), instruction=""),
            Ask(("How does a volcano work?",), instruction=""),
            Ask(("What is gravity?",), instruction=""),
        ),
    ),
    Scene(
        "Again the first prefix. It was used often, so it is still cached.",
        (Ask(("What is a planet?",)),),
    ),
)

ANSWERS = {
    "What is a planet?": "A planet is a large round body.",
    "What is a star?": "A star is a huge ball of hot gas.",
    "What is a comet?": "A comet is a small body of ice.",
    "What is gravity?": "Gravity is the force.",
    "How does a volcano work?": "A volcano erupts.",
    "How does a rainbow work?": "A rainbow forms.",
    "What is a glacier?": "A glacier is a thick mass of ice.",
    "What is a desert?": "A desert is a region.",
    "What is an island?": "An island is a piece of land.",
}
