"""The examination of a model trained on the corpus: which questions it answers right, by a fixed rule.

python -m chapters.tiny_chat.judge        # the bundled model
"""

import random
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from chapters.tiny_chat.corpus import Fact, read, words
from chapters.tiny_chat.wordings import key
from phase0_request.lab.report import finish, parser
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase0_request.tokenizer import BUNDLED

if TYPE_CHECKING:
    from phase2_prefill_decode.model import Model

HELD_OUT = Path(__file__).parent / "held_out.toml"
SETS = ("held_out", "development", "trained")  # the last: the questions the corpus itself lists
ALIKE = 0.9
LONGEST_ANSWER = 96  # tokens, the end among them; the longest of the corpus has 53
BATCH = 64
SAMPLED = 500  # of the 16,743 trained questions

Reason = Literal["right", "did not end", "another kind", "another fact", "no fact", "a name or number"]
Answerer = Callable[[list[str]], list[tuple[str, bool]]]  # questions to (text, whether the model ended it by itself)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the fact that answers it, and the set it is counted in."""

    ask: str
    fact: Fact
    set: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an answer is right or not, and its similarity to the answer of the right fact."""

    why: Reason
    similarity: float

    @property
    def right(self) -> bool:
        return self.why == "right"


@dataclass(frozen=True, slots=True)
class Graded:
    question: Question
    text: str
    verdict: Verdict


def judge(text: str, ended: bool, fact: Fact, facts: Sequence[Fact]) -> Verdict:
    """An answer is right if the model ended it by itself and it says the fact's answer:

    - its words are those of that answer, in order, but for a slip: 2 * matching / (words of both) >= 0.9. In a
      sentence of twenty words that forgives two wrong words or three lost ones, and no second sentence;
    - no answer of another fact is closer. No two answers of the corpus are so much alike, so what passes as one of
      them does not pass as another;
    - its names and numbers are exactly those of that answer, because there one word is the whole fact: "The capital
      of France is Berlin, a city on the river Seine" has eleven words of twelve right.

    Punctuation does not count. Meaning is not judged, so a true sentence in other words is refused: the model learned
    its answers by heart, and one that it made up would be right by luck.
    """
    similarity = _similarity(text, fact)
    nearest = fact if similarity == 1 else _nearest(text, fact, facts)
    why: Reason
    if not ended:
        why = "did not end"
    elif _similarity(text, nearest) < ALIKE:
        why = "no fact"
    elif nearest is not fact:
        why = "another kind" if nearest.topic and nearest.topic == fact.topic else "another fact"
    else:
        why = "right" if _names(text) == _names(fact.answer) else "a name or number"
    return Verdict(why, similarity)


def _similarity(text: str, fact: Fact) -> float:
    return SequenceMatcher(None, words(fact.answer), words(text), autojunk=False).ratio()


def _nearest(text: str, fact: Fact, facts: Sequence[Fact]) -> Fact:
    """The fact with the most similar answer. The two quick ratios are upper bounds; they pass over nearly all facts."""
    matcher = SequenceMatcher(None, [], words(text), autojunk=False)  # its second sequence is the one it indexes
    nearest, best = fact, -1.0
    for other in (fact, *facts):
        matcher.set_seq1(words(other.answer))
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
            nearest, best = other, matcher.ratio()
    return nearest


def _names(text: str) -> list[str]:
    """The words written with a capital or a digit, in order."""
    return [word for word in re.findall(r"\w+", text) if re.search(r"\d", word) or word != word.lower()]


def examine(answer: Answerer, questions: Sequence[Question], facts: Sequence[Fact]) -> list[Graded]:
    """Ask all questions at once, so that the answerer may batch them as it likes, and judge every answer."""
    answers = answer([question.ask for question in questions])
    return [
        Graded(question, text, judge(text, ended, question.fact, facts))
        for question, (text, ended) in zip(questions, answers, strict=True)
    ]


def figures(graded: Sequence[Graded]) -> dict[str, Any]:
    """How many answers are right, how many of these word for word, and how often each way to fail was seen."""
    right = [one.verdict for one in graded if one.verdict.right]
    return {
        "asked": len(graded),
        "right": len(right),
        "share": round(len(right) / len(graded), 4) if graded else 0.0,
        "word_for_word": sum(verdict.similarity == 1 for verdict in right),
        "failures": dict(Counter(one.verdict.why for one in graded if not one.verdict.right).most_common()),
    }


def held_out(facts: Sequence[Fact], file: Path = HELD_OUT) -> tuple[Question, ...]:
    """The paraphrases of a file. KeyError if one is of a fact that is not in the corpus."""
    known = {key(fact): fact for fact in facts}
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["question"]
    return tuple(Question(entry["ask"], known[entry["fact"]], entry["set"]) for entry in entries)


def trained(facts: Iterable[Fact], seed: int = 0) -> list[Question]:
    """SAMPLED questions of the corpus, drawn by the seed."""
    questions = [Question(ask, fact, SETS[2]) for fact in facts for ask in fact.questions]
    return random.Random(seed).sample(questions, SAMPLED)


def answers_by(model: "Model", kv_cache_dtype: str | None = None) -> Answerer:
    """Greedy answers of a model by phase 2's engine, each question a chat of its own."""
    from phase2_prefill_decode.engine import static

    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError("the model has no tokenizer")
    params = SamplingParams(temperature=0, max_tokens=LONGEST_ANSWER)

    def answer(asks: list[str]) -> list[tuple[str, bool]]:
        prompts = [tokenizer.chat([{"role": "user", "content": ask}]) for ask in asks]
        done = static(model, batch_size=BATCH, kv_cache_dtype=kv_cache_dtype).generate(prompts, params, progress=True)
        return [(one.text, one.finish_reason is FinishReason.STOP) for one in done]

    return answer


def main(arguments: list[str] | None = None) -> int:
    p = parser("chapters.tiny_chat.judge", __doc__)
    p.add_argument("--directory", type=Path, default=BUNDLED, help="the model, with its tokenizer (the bundled one)")
    p.add_argument("--seed", type=int, default=0, help="which trained questions are asked (%(default)s)")
    p.add_argument("--show-failures", action="store_true", help="each wrong answer beside the right one")
    options, facts = p.parse_args(arguments), read()
    from phase2_prefill_decode.model import Model  # here: torch takes a second

    model = Model.load(options.directory, dtype="float32")
    graded = examine(answers_by(model), [*held_out(facts), *trained(facts, options.seed)], facts)
    by_set = {name: [one for one in graded if one.question.set == name] for name in SETS}
    for name, some in by_set.items():
        found = figures(some)
        print(f"{name}: {found['right']} of {found['asked']} right, {found['word_for_word']} word for word")
        for one in some if options.show_failures else ():
            if not one.verdict.right:
                print(f"\n{one.question.ask}  [{one.verdict.why}, {one.verdict.similarity:.2f}]")
                print(f"  wanted  {one.question.fact.answer}\n  given   {one.text}")
    given = ["--directory", f"{options.directory}", "--seed", f"{options.seed}"]
    finish(p, options, given, {name: figures(some) for name, some in by_set.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
