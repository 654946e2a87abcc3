"""`python -m phase4_radix`: watch the tree of prefixes grow, split and lose leaves; with --type, by your prompts."""

from phase0_request.entry import run

run("phase4_radix.lab.demo:main")
