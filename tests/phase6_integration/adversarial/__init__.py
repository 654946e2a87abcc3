# ruff: noqa: E501
"""Attacks on the server, one module per class of published advisory. Each names the cases of other servers.

| class | cases of other servers | tests |
|---|---|---|
| HTTP: request smuggling, heads, trailers and bodies without an end, slow readers | CVE-2025-59822 (http4s), CVE-2026-40561 (Starlet), CVE-2025-48956 (vLLM), CVE-2025-46728 (cpp-httplib) | `test_http`; limits of headers, sizes and encodings (decompression: refused) in `../test_middleware` |
| API keys: comparison in time that depends on the key, routes that need none | CVE-2025-59425, CVE-2026-48746 (vLLM) | `../test_middleware` |
| leaks: input, paths and addresses in errors; files by path | class of error messages and of path traversal | `test_requests`, `test_http`, `../test_conformance` |
| memory: n, bodies, answers, slow readers | CVE-2026-34756, CVE-2026-5497 (vLLM) | `test_memory` |
| bodies: numbers out of range, empty prompts, fields that reach templates, parsers, files or the network | CVE-2024-8768, CVE-2025-62426, CVE-2025-48944, CVE-2025-62164, CVE-2025-6242 (vLLM), CVE-2026-21869 (llama.cpp) | `test_requests`; `../test_schema` from /openapi.json |
| the engine's channel: deserialization that executes, a length that allocates | CVE-2024-50050 (Meta), CVE-2026-3059 and CVE-2026-3060 (SGLang), CVE-2025-30202 (vLLM) | `test_wire` |
| model files that execute, crash or allocate | CVE-2025-32434 (PyTorch), CVE-2026-22807 (vLLM) | `test_checkpoints`, `test_config_bombs` |
| chat templates: injection, size, time; control tokens from text | CVE-2024-34359 (llama-cpp-python), CVE-2026-5760 (SGLang), CVE-2024-56326 (Jinja), CVE-2026-44222 (vLLM) | `test_text`, `test_log_pipe` |
| launch: code from the working directory | class of untrusted search paths (CWE-426) | `test_launch` |
| failure: a request or a shortage that leaves a server which answers nothing | CVE-2026-44223 (vLLM) | `test_failure`; one request's fault in `../test_failures_http` |
| tenants: prefixes seen through the cache, one client that takes every seat | class of "leaking secrets from prefix caches" (vLLM's `cache_salt`) | `test_tenancy` |
| hosts: DNS rebinding, other origins | class of CWE-350 | `test_hosts` |
| floods of clients that hang up | class of CWE-400 | `../test_chaos` |

What runs with `make test` takes seconds. The long versions, with many more examples, are marked `slow`.
"""
