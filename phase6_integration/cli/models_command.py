"""`nanoserve models`: what has a short name, what was downloaded, and the families that load."""

import argparse

from huggingface_hub import CacheNotFound, scan_cache_dir

from phase0_request.support.flags import Parser, add_fields
from phase6_integration.engine.options import EngineOptions
from phase6_integration.support.named_models import cache_folder, families, gguf_architectures, kept, offered

MB = 1e6


def add_flags(parser: Parser) -> None:
    parser.description = "List the models that have a short name, what was downloaded, and the families that load."
    add_fields(parser, EngineOptions, only=("download_dir",))


def run(given: argparse.Namespace, parser: Parser) -> int:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    download_dir = getattr(given, "download_dir", None)
    table, folder = Table(box=box.SIMPLE), cache_folder(download_dir)
    for head in ("name", "model", "MB", "licence", "here"):
        table.add_column(head, justify="right" if head == "MB" else "left", overflow="fold")
    table.add_row("tiny_chat", "the bundled model, of LLM serving and simple facts", "8", "Apache-2.0", "yes")
    for name, model in offered().items():
        here = "yes" if kept(name, folder) else "no"
        table.add_row(name, model.words, f"{model.size / MB:.0f}", model.license, here)
    for repository, size in downloaded(download_dir):
        table.add_row(repository, "a repository on the Hugging Face hub", f"{size / MB:.0f}", "", "yes")
    console = Console(soft_wrap=not Console().is_terminal)
    console.print(table)
    console.print(f"Short names are kept in {folder}; `nanoserve serve NAME` downloads what is not here.")
    console.print("Of the hub, `nanoserve serve Qwen/Qwen3-0.6B`, or REPO:Q4_K_M for a GGUF file.")
    console.print(f"Classes that load: {', '.join(families())}.")
    console.print(f"As GGUF: {', '.join(gguf_architectures())}.")
    return 0


def downloaded(download_dir: str | None) -> list[tuple[str, int]]:
    """The models in the hub's cache, with their bytes."""
    try:
        found = scan_cache_dir(download_dir)
    except CacheNotFound:
        return []
    return sorted((repo.repo_id, repo.size_on_disk) for repo in found.repos if repo.repo_type == "model")
