"""The colours of the demos: one for each thing, in all phases. Requests have those of the book's drawings. A terminal's
dark blue is none of them: on black it cannot be read."""

# What a request does in a step.
WAITING = "dim"
PREFILL = "yellow"
DECODE = "cyan"
LEFT_OUT = "magenta"  # it runs, and has no token in this step
PREEMPTED = "bold red"
ENDED = "dim"
FAULT = "red"  # refused, or ended by an error

# What a page of the KV cache holds.
IN_USE = "green"
CACHED = "cyan"
FREE = "dim"
WASTED = "red"  # reserved, and empty

SALT = "magenta"  # whose prefix it is: no other tenant's requests share it
