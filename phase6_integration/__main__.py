"""`python -m phase6_integration`: all seven phases as one engine, step by step, on the bundled model."""

from phase0_request.support.entry import run

run("phase6_integration.lab.demo:main")
