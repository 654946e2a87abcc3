"""`python -m phase0_request`: watch requests live their lives through a server whose model is a mock."""

from phase0_request.entry import run

run("phase0_request.lab.demo:main")
