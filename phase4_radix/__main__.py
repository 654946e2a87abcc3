"""`python -m phase4_radix`: watch a radix tree grow, split and evict its leaves. `--type` reads your own prompts."""

from phase0_request.support.entry import run

run("phase4_radix.lab.demo:main")
