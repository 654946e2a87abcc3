"""The cases of other servers' own API tests, in our words: what each asks for, and what must hold of the answer.

They are those of vLLM (`tests/entrypoints/openai`), llama.cpp (`tools/server/tests/unit`) and SGLang (`test/anthropic`)
that ask over HTTP and do not need a model of theirs. Their tests want an answer in `PASSING`, and an error in `WRONG`.
They want an answer in `REFUSED` and an error in `MORE`, where this server does otherwise, with the reason.
"""

from peers import chats, completions, messages, others

PASSING = chats.PASSING | completions.PASSING | messages.PASSING | others.PASSING
WRONG = chats.WRONG | completions.WRONG | messages.WRONG | others.WRONG
REFUSED = completions.REFUSED | chats.REFUSED | others.REFUSED | messages.REFUSED
MORE = messages.MORE | chats.MORE
