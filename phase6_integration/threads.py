"""How an engine's threads wait, beside a front and its clients on the same cores.

How many there are is for phase 2 to say: one for a small model, all cores for a large one. Threads that spin while they
wait take the cores from the front; those of a large model sleep.
"""

import os

from phase2_prefill_decode.threads import cores


def environment(threads: int) -> dict[str, str]:
    """Variables for the process of an engine with so many threads. What somebody has set is left alone."""
    wait = {"OMP_WAIT_POLICY": "passive"} if threads >= cores() > 1 else {}
    return {name: value for name, value in wait.items() if name not in os.environ}
