"""`python -m chapters.charts`: draws every chart of the book from the result files, then the drawings."""

import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent / "figures"
CONTEXT = 256  # tokens of context of the decodes whose times are drawn
BLUE, RED, GREEN, GREY = "#1d6996", "#c0392b", "#2e8b57", "#667788"
DARK = {  # a colour in light: the one in dark mode
    "#ffffff": "#161b22", BLUE: "#6db3dd", RED: "#f07a6c", GREEN: "#63c78d", "#b36b00": "#e6b450",
    "#74489c": "#b08ede", GREY: "#a3b1be", "#34495e": "#c5d0da", "#e3e8ec": "#2f3943", "#d5dbe0": "#46525e",
}  # fmt: skip

STYLE: Any = {
    "svg.hashsalt": "nano-serving",  # the same chart makes the same file
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "grid.color": "#e3e8ec",
    "axes.grid": True,
    "axes.axisbelow": True,
}


def curves(axes: Any, x: Sequence[Any], named: Mapping[str, Sequence[float]], **settings: Any) -> None:
    """A line with marks for each of these; more than one have a legend."""
    for (name, values), color in zip(named.items(), (BLUE, RED, GREEN), strict=False):
        axes.plot(x, values, "o-", color=color, label=name)
    axes.set(**settings)
    if len(named) > 1:
        axes.legend(frameon=False)


def batching(figure: Any, result: dict[str, Any]) -> None:
    """Throughput and ITL by batch size."""
    rows = sorted(result["figures"]["batching"].values(), key=lambda row: row["batch_size"])
    sizes = [row["batch_size"] for row in rows]
    left, right = figure.subplots(1, 2)
    throughput = {"": [row["tokens_per_second"] for row in rows]}
    itl = {name: [row[f"itl_{name}_ms"] for row in rows] for name in ("p50", "p99")}
    curves(left, sizes, throughput, title="Throughput, tokens/s", xlabel="batch size", ylim=0)
    curves(right, sizes, itl, title="Inter-token latency (ITL), ms", xlabel="batch size", ylim=0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))


def _policy_order(name: str) -> tuple[str, int]:
    """Contiguous blocks first, then pages by their size."""
    kind, _, size = name.partition("_")
    return kind, int(size) if size.isdecimal() else 0


def fragmentation(figure: Any, result: dict[str, Any]) -> None:
    """What the memory holds while requests wait for it, under each allocation policy."""
    outcomes = dict(sorted(result["figures"]["policies"].items(), key=lambda item: _policy_order(item[0])))
    axes = figure.subplots()
    blocks = {"contiguous_max": "a block of the longest", "contiguous_pow2": "a block, doubled"}
    names = [blocks.get(name) or name.replace("pages_", "pages of ") for name in outcomes]
    tokens = [o["memory_share"] for o in outcomes.values()]
    empty = [o["reserved_share"] - o["memory_share"] for o in outcomes.values()]
    free = [1 - o["reserved_share"] for o in outcomes.values()]
    axes.barh(names, tokens, color=GREEN, label="tokens")
    axes.barh(names, empty, left=tokens, color=RED, label="reserved, empty")
    axes.barh(names, free, left=[t + e for t, e in zip(tokens, empty, strict=True)], color="#d5dbe0", label="free")
    for row, outcome in enumerate(outcomes.values()):
        axes.text(0.01, row, f"{outcome['mean_running']:.0f} requests at once", color="white", va="center", fontsize=9)
    axes.set(title="Share of the KV pool, while requests wait for pages", xlim=(0, 1))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.07))


def steps(figure: Any, result: dict[str, Any]) -> None:
    """The time of a step by its tokens: measured, and as four speeds of the same machine give it."""
    from phase2_prefill_decode.lab.cost import CostModel
    from phase2_prefill_decode.lab.shapes import SHAPES

    points, model = result["figures"]["points"], CostModel(SHAPES["596m"], dtype="bfloat16")
    short, long = points["decode_8_64"], points["decode_8_4096"]
    products = 1e9 * max(p["gflops"] for p in points.values())
    weights = 1e9 * max(p["gb_per_second"] for p in points.values())
    pages = (long["bytes"] - short["bytes"]) / (long["seconds"] - short["seconds"])
    scores = 1e9 * result["figures"]["ceilings"]["gflops_float32"]

    def ms(pieces: Sequence[tuple[int, int]]) -> float:
        cost = model.pieces(pieces)
        attention, others = cost.attention, cost.linears + cost.head + cost.pointwise
        return 1e3 * float(
            max(others.operations / products, others.bytes / weights)
            + max(attention.operations / scores, attention.bytes / pages)
        )

    axes = figure.subplots()
    floor, tokens = points["prefill_1_1"]["bytes"] / weights * 1e3, [2 ** (i / 4) for i in range(45)]
    rise = points["prefill_1_256"]["ms"] / 256
    dashed = {"color": GREY, "linewidth": 1, "linestyle": (0, (4, 3)), "zorder": 1}
    axes.plot((1, 2600), (floor, floor), **dashed)
    axes.plot((9, 2600), (9 * rise, 2600 * rise), **dashed)
    beside = {"color": GREY, "fontsize": 9, "textcoords": "offset points"}
    axes.annotate("reading the weights", (2600, floor), (0, 4), ha="right", **beside)
    axes.annotate("multiplying", (1100, 1100 * rise), (6, -14), **beside)
    looks = (
        ("a prompt of n tokens", "prefill", BLUE, "o", lambda n: [(0, n)]),
        (f"n decodes, each over {CONTEXT} tokens", "decode", RED, "s", lambda n: [(CONTEXT - 1, 1)] * n),
    )
    for name, phase, color, marker, pieces in looks:
        its = [p for p in points.values() if p["phase"] == phase and (phase == "prefill" or p["context"] == CONTEXT)]
        count = {p["batch"] * p["tokens"]: p["ms"] for p in its}
        line = sorted({round(n) for n in tokens if n <= max(count)})
        axes.plot(line, [ms(pieces(n)) for n in line], color=color, linewidth=1.4)
        axes.plot(list(count), list(count.values()), marker, color=color, markersize=6, label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="tokens that the step computes", title="Time of a step, ms: 596M parameters"
    )
    axes.set_xticks(ticks := [1, 4, 16, 64, 256, 1024], [f"{tick:,}" for tick in ticks])
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:,.10g}")
    axes.minorticks_off()
    axes.legend(frameon=False, loc="upper left")


def stall(figure: Any, result: dict[str, Any]) -> None:
    """ITL of the decodes and TTFT of the long prompt, by chunk size."""
    outcomes = sorted(result["figures"]["outcomes"].values(), key=lambda o: o["chunk"] or 1 << 30)
    names = [f"{o['chunk']:,}" if o["chunk"] else "whole" for o in outcomes]
    left, right = figure.subplots(1, 2)
    left.axhline(outcomes[-1]["calm_gap_ms"], color=GREY, linestyle="--", linewidth=1, label="before it arrived")
    gaps = {name: [o[f"{key}_gap_ms"] for o in outcomes] for name, key in (("median", "p50"), ("worst", "worst"))}
    top = 1.1 * max(gaps["worst"])
    curves(left, names, gaps, title="ITL of the decoding requests, ms", xlabel="chunk size", ylim=(0, top))
    times = {"its TTFT": [o["ttft_ms"] for o in outcomes], "all finished": [o["total_ms"] for o in outcomes]}
    title = "Since the long prompt arrived, ms"
    curves(right, names, times, title=title, xlabel="chunk size", ylim=(0, 1.15 * max(times["all finished"])))


def prefix(figure: Any, result: dict[str, Any]) -> None:
    """TTFT by the length of the cached prefix, and hit rate by cache size."""
    left, right = figure.subplots(1, 2)
    common = sorted(result["figures"]["common"].values(), key=lambda row: row["common"])
    times = {"cache on": [row["ttft_ms"] for row in common], "cache off": [row["plain_ttft_ms"] for row in common]}
    title, below = "TTFT of a prompt of 544 tokens, ms", "tokens of its prefix that are cached"
    curves(left, [row["common"] for row in common], times, title=title, xlabel=below, ylim=0)
    chats = {int(name.split("_")[0]): list(sizes.values()) for name, sizes in result["figures"]["chats"].items()}
    rates: dict[str, list[float]] = {}
    for users, rows in sorted(chats.items()):
        rows.sort(key=lambda row: row["pages"])
        rates[f"{users} users"] = [100 * row["hit_rate"] for row in rows]
    pages = [row["pages"] for row in rows]
    curves(right, pages, rates, title="Chats: hit rate, %", xlabel="pages of the cache", xscale="log", ylim=(0, 100))
    right.set_xticks(ticks := [256, 512, 1024, 2048, 4096], [f"{tick:,}" for tick in ticks])
    right.minorticks_off()


def overlap(figure: Any, result: dict[str, Any]) -> None:
    """When the host works and when the device does, in a few decode steps, without and with one step ahead."""
    rows = [result["figures"][f"batch_256_ahead_{ahead}"]["timeline"] for ahead in (0, 1)]
    end = max(row["device"][-1][1] for row in rows)
    titles = ("Without running ahead", "One step ahead")
    for axes, row, title in zip(figure.subplots(2, 1, sharex=True), rows, titles, strict=True):
        for place, (lane, color) in enumerate((("host", RED), ("device", BLUE))):
            axes.broken_barh([(a, b - a) for a, b in row[lane]], (place - 0.35, 0.7), color=color, edgecolor="white")
        axes.set(title=title, xlim=(0, end), ylim=(1.5, -0.5))
        axes.set_yticks((0, 1), ("host", "device"))
        axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms")


LADDER = (
    ("tokens_per_second", "output tokens/s: higher is better \u2192"),
    ("ttft_p50_ms", "\u2190 lower is better: TTFT, median, ms"),
    ("tokens_per_step", "requests that share a step \u2192"),
    ("itl_mean_ms", "\u2190 and its price: ITL, mean, ms"),
)


def ladder(figure: Any, result: dict[str, Any]) -> None:
    """One trace through transformers and the engines of the phases: a bar each. The reader's own is a mark."""
    rungs, mine = result["figures"]["rungs"], result["figures"].get("mine", {})
    rungs = {name: rungs[name] for name in ("transformers", *(name for name in rungs if name != "transformers"))}
    colors = [GREY if name == "transformers" else BLUE for name in rungs]
    for axes, (key, title) in zip(figure.subplots(2, 2, sharey=True).flat, LADDER, strict=True):
        values = [row[key] for row in rungs.values()]
        axes.barh([name.replace("phase", "phase ") for name in rungs], values, color=colors, height=0.66)
        axes.bar_label(axes.containers[0], fmt="{:,.0f}", padding=5)
        axes.set_xlim(0, 1.25 * max(values))
        for name, row in mine.items():
            axes.plot(row[key], list(rungs).index(name), "D", color=RED, markeredgecolor="white")
        axes.set(title=title, xticks=[])
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(length=0)
    axes.invert_yaxis()


ROUTED = {"random": GREY, "least_loaded": GREEN, "approximate_tree": RED, "digests": BLUE}
ROUTED_TRACES = {"conversations": "Conversations", "tenants": "Tenants", "shared_prompts": "Shared prompts"}


def loops(figure: Any, result: dict[str, Any]) -> None:
    """TTFT of a closed and of an open loop by their rate."""
    rows = sorted(result["figures"].values(), key=lambda row: row["rate"])
    for axes, q in zip(figure.subplots(1, 2, sharey=True), ("p50", "p99"), strict=True):
        for loop, color in (("closed", BLUE), ("open", RED)):
            points = [(row["rate"], row[loop][f"{q}_ttft_ms"]) for row in rows if loop in row]
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=f"{loop} loop")
        axes.set(title=f"TTFT, {q}, ms", xlabel="requests a second", yscale="log")
        axes.legend(frameon=False)


def routing(figure: Any, result: dict[str, Any]) -> None:
    """Hit rate and p99 TTFT of routers by load, on traces that share prefixes."""
    rows = figure.subplots(2, len(ROUTED_TRACES), sharex="col", sharey="row")
    for column, (trace, title) in enumerate(ROUTED_TRACES.items()):
        rates = result["figures"]["loads"][trace]
        loads = sorted(rates, key=_rate)
        for (router, color), marker in zip(ROUTED.items(), "vsDo", strict=True):
            points = [rates[load][router] for load in loads]
            name, x = router.replace("_", " "), [_rate(load) for load in loads]
            rows[0][column].plot(x, [100 * p["hit_rate"] for p in points], f"{marker}-", ms=4, color=color, label=name)
            rows[1][column].plot(x, [p["ttft_p99_ms"] for p in points], f"{marker}-", ms=4, color=color)
        rows[0][column].set(title=title, ylim=(0, 100))
        rows[1][column].set(yscale="log", xlabel="requests/s of each replica")
        rows[1][column].axhline(1000, color=GREY, linestyle="--", linewidth=1)
    rows[0][0].set_ylabel("hit rate, %")
    rows[1][0].set_ylabel("TTFT p99, ms")
    rows[1][0].set_yticks(ticks := (10, 100, 1000, 10_000, 100_000), [f"{tick:,}" for tick in ticks])
    figure.legend(*rows[0][0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside lower center")


def _rate(name: str) -> float:
    return float(name.removeprefix("rate_"))


Chart = tuple[str, tuple[float, float], Callable[[Any, dict[str, Any]], None]]


def allowed(figure: Any, result: dict[str, Any]) -> None:
    """How many tokens may be drawn at each place of an output under a schema."""
    output = result["figures"]["output"]
    axes = figure.subplots()
    for forced, color, name in ((True, GREY, "forced: appended without a draw"), (False, BLUE, "drawn")):
        places = [place for place, is_forced in enumerate(output["forced"]) if is_forced is forced]
        axes.bar(places, [output["allowed"][place] for place in places], color=color, label=name)
    axes.set(title="Tokens that may be drawn, of 4,096", yscale="log", ylim=(0.7, 40_000), xlim=(-1, output["tokens"]))
    axes.set_xticks(range(output["tokens"]), output["texts"], rotation=90, family="monospace", fontsize=11)
    axes.set_yticks(counts := (1, 10, 100, 1000), [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.grid(axis="x", visible=False)
    axes.legend(frameon=False, ncols=2, loc="upper right")


FORMATS = {"bfloat16": ("ours", "llama"), "Q8_0": ("ours_Q8_0", "llama_Q8_0"), "Q4_0": ("ours_Q4_0", "llama_Q4_0")}


def peers(figure: Any, result: dict[str, Any]) -> None:
    """The rate of this engine over that of llama.cpp with the same weights, by workload and format."""
    from chapters.generated import in_words
    from phase6_integration.lab.peers.compare import in_order

    titles = {"native": "AVX-512", "avx2": "AVX2"}
    places: list[str] = []
    for axes, (isa, title) in zip(figure.subplots(2, 1, sharex=True, sharey=True), titles.items(), strict=True):
        shapes = result["figures"][isa].items()
        rows = {
            f"{shape.upper()}\n{in_words(load)}": its[load] for shape, its in shapes for load in in_order(shape, its)
        }
        rows = {name: row for name, row in rows.items() if "llama_Q8_0" in row}
        places = places or list(rows)  # AVX2 has some of these
        for turn, ((name, (ours, other)), color) in enumerate(zip(FORMATS.items(), (BLUE, GREEN, GREY), strict=True)):
            ratios = [row[ours]["median"] / row[other]["median"] for row in rows.values()]
            bars = [places.index(each) + (turn - 1) * 0.27 for each in rows]
            axes.bar(bars, [ratio - 1 for ratio in ratios], 0.27, bottom=1, color=color, label=name)
            for bar, ratio in zip(bars, ratios, strict=True):
                above = (0, 3 if ratio >= 1 else -11)
                axes.annotate(f"{ratio:.1f}", (bar, ratio), above, textcoords="offset points", ha="center", fontsize=8)
        axes.axhline(1, color=GREY, linewidth=1)
        axes.set(title=f"{title}: rate over llama.cpp's with the same weights", yscale="log", ylim=(0.8, 6.5))
        axes.set_yticks(ticks := (1, 2, 4), [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.grid(axis="x", visible=False)
    axes.set_xticks(range(len(places)), [place.replace(" prompts", "\nprompts") for place in places], fontsize=9)
    figure.axes[1].legend(frameon=False, ncols=3, loc="upper right")


PARTS = "#b36b00", "#74489c", "#34495e", "#d5dbe0"  # no colour of the ways to run a step
KERNELS = {  # what their names begin with, of those of this project
    "attention": ("decode_kernel", "join_kernel", "prefill_kernel"),
    "norms, rotation, SwiGLU": ("add_norm_kernel", "rotate_store_kernel", "swiglu_kernel"),
}


def gpu(figure: Any, result: dict[str, Any]) -> None:
    """Decode steps of an 8B model in each way to run them, and the kernels of decode and mixed steps."""
    left, right = figure.subplots(1, 2, width_ratios=(4, 5))
    steps = result["figures"]["steps"]["rows"]
    ways = {"eager": "kernel by kernel", "graphs": "as a graph", "ahead": "and one step ahead"}
    batches = 1, 64, 256
    for turn, ((way, label), color) in enumerate(zip(ways.items(), (GREY, GREEN, BLUE), strict=True)):
        rows = [steps[f"steps_8b_{way}_False_{batch}_1024"] for batch in batches]
        places = [place + (turn - 1) * 0.27 for place in range(len(batches))]
        bars = left.bar(places, [row["ms"] for row in rows], 0.27, color=color, label=label)
        left.bar_label(bars, fmt="%.1f", fontsize=8)
    roofline = [row["roofline_ms"] for row in rows]
    left.hlines(
        roofline, [place - 0.4 for place in range(3)], [place + 0.4 for place in range(3)], RED, label="roofline"
    )
    left.set_xticks(range(len(batches)), [f"{batch} request{'s' * (batch > 1)}" for batch in batches])
    left.set(title="A decode step of an 8B model, ms", ylim=0)
    left.grid(axis="x", visible=False)
    left.legend(frameon=False)
    profiles = result["figures"]["profiles"]["rows"]
    shown = {f"8b_ahead_False_{batch}": f"{batch} decoding" for batch in batches}
    shown |= {f"8b_ahead_True_{batch}": f"{batch} decoding,\n{2048 - batch:,} of prompts" for batch in (64, 192)}
    starts = [0.0] * len(shown)
    for part, color in zip((*KERNELS, "matrix products", "the rest"), PARTS, strict=True):
        taken = [_kernels(profiles[name], part) for name in shown]
        right.barh(range(len(shown)), taken, left=starts, color=color, label=part)
        starts = [start + ms for start, ms in zip(starts, taken, strict=True)]
    right.set_yticks(range(len(shown)), shown.values())
    right.invert_yaxis()
    right.set(title="Its kernels, ms a step")
    right.grid(axis="y", visible=False)
    right.legend(frameon=False)


def _kernels(profile: dict[str, Any], part: str) -> float:
    """Milliseconds a step in these kernels."""
    total = 0.0
    for row in profile["kernels"]:
        names = [name for name, begins in KERNELS.items() if row["name"].startswith(begins)]
        product = "nvjet" in row["name"] or "cublas" in row["name"]
        total += row["us"] * (part == (names[0] if names else "matrix products" if product else "the rest"))
    return float(total / profile["steps"] / 1e3)


CHARTS: dict[str, Chart] = {
    "allowed.svg": ("constrained.json", (10.5, 4.0), allowed),
    "batching.svg": ("phase0.json", (8.8, 3.2), batching),
    "fragmentation.svg": ("fragmentation.json", (8.8, 3.6), fragmentation),
    "steps.svg": ("phase2_phases_596m.json", (8.0, 4.6), steps),
    "stall.svg": ("stall.json", (8.8, 3.2), stall),
    "prefix.svg": ("phase4.json", (8.8, 3.4), prefix),
    "gpu.svg": ("gpu_h100.json", (8.8, 3.8), gpu),
    "ladder.svg": ("ladder.json", (6.8, 4.6), ladder),
    "peers.svg": ("peers.json", (8.8, 5.2), peers),
    "routing.svg": ("routing.json", (8.8, 4.8), routing),
    "loops.svg": ("loops.json", (8.8, 3.2), loops),
    "overlap.svg": ("phase6_overlap.json", (8.8, 3.2), overlap),
}


def fingerprint(name: str, results: Path = RESULTS) -> str:
    """Identify the result file that a chart was drawn from. Stored in the SVG, it reveals an outdated chart."""
    source = CHARTS[name][0]
    return f"{source} {hashlib.sha256((results / source).read_bytes()).hexdigest()[:16]}"


def with_dark_mode(svg: str) -> str:
    """Add a style for dark mode to what matplotlib has drawn in light colours."""
    rules = [
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
        if f"{what}: {light}" in svg
    ]
    rules.append("text{fill:#e6edf3}")  # it writes no colour for black
    style = f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    return re.sub(r"<svg\b[^>]*>", lambda opening: f"{opening[0]}\n{style}", svg, count=1)


def draw(name: str, results: Path = RESULTS, figures: Path = FIGURES) -> Path:
    """Draw one chart and return its path."""
    import matplotlib
    from matplotlib.figure import Figure

    source, size, paint = CHARTS[name]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        paint(figure, json.loads((results / source).read_text("utf-8")))
        about = {"Date": None, "Source": fingerprint(name, results)}
        figure.savefig(buffer := io.StringIO(), format="svg", metadata=about)
    (figures / name).write_text(with_dark_mode(buffer.getvalue()), "utf-8")
    return figures / name


if __name__ == "__main__":
    from chapters.drawings.catalog import DRAWINGS

    for chart in CHARTS:
        print(draw(chart).name)
    for name, make in DRAWINGS.items():
        (FIGURES / name).write_text(make().svg(), "utf-8")
        print(name)
