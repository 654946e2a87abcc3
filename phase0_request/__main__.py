"""`python -m phase0_request`: watch requests pass through a server with a mock model."""

from phase0_request.support.entry import run

run("phase0_request.lab.demo:main")
