"""What the demo plays: who asks what, together, and what to look at."""

from dataclasses import dataclass

INSTRUCTION = "Answer in one short sentence.\n"


@dataclass(frozen=True, slots=True)
class Ask:
    """Questions of the corpus, put by one person one after the other. All but the last have been answered."""

    questions: tuple[str, ...]
    instruction: str = INSTRUCTION
    salt: str = ""
    answer: str = ""  # instead of the one in the corpus


@dataclass(frozen=True, slots=True)
class Scene:
    """Some who come together, and what there is to see."""

    caption: str
    asks: tuple[Ask, ...]


SCENES = (
    Scene(
        "One asks. Pages enter the tree once they are full and computed.",
        (Ask(("What is a desert?",)),),
    ),
    Scene(
        "Two begin like the first. Its run is split where they part.",
        (Ask(("What is a comet?",)), Ask(("What is a star?",))),
    ),
    Scene(
        "The first asks on. Its own answer is found as well.",
        (Ask(("What is a desert?", "What is an island?")),),
    ),
    Scene(
        "Three ask the same at once. All compute it, the pages of one are kept; the answers differ.",
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
        "The same words with another salt share nothing.",
        (Ask(("What is a desert?",), salt="tenant"),),
    ),
    Scene(
        "Strangers need room. The leaves least recently used go.",
        (
            Ask(("How does a rainbow work?",), instruction=""),
            Ask(("How does a volcano work?",), instruction=""),
            Ask(("What is gravity?",), instruction=""),
        ),
    ),
    Scene(
        "One more begins like the first. What many used is still there.",
        (Ask(("What is a planet?",)),),
    ),
)
