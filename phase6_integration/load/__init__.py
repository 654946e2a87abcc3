"""A load generator for OpenAI-compatible servers: workload, connections, responses and report.

It runs on the machine of the server and takes its processor time from it. So it is built to be cheap: connections over
httptools, and msgspec parses only the fields that matter.
"""
