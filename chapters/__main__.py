"""`python -m chapters`: the course's commands."""

from phase0_request.support.entry import run

run("chapters.cli:main")
