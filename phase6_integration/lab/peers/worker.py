"""What a process of the comparison does: it answers lines of JSON. Needs the standard library only, so that it runs in
the environment of any engine."""

import json
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], list[list[int]]]  # prompts and the length of each answer, to the answers


def serve(about: dict[str, str], generate: Generate) -> None:
    """Say what the engine is, then generate for each line of stdin and say how long that took."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        answers = generate(asked["prompts"], asked["output"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "lengths": [len(answer) for answer in answers]}), flush=True)
