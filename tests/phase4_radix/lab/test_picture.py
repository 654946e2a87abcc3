import random

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.charts import STYLE
from phase4_radix.lab.picture import KEPT, LOCKED, blocks, picture
from phase4_radix.radix_tree import RadixTree


def grown(prompts: int, seed: int = 0) -> RadixTree:
    """A tree of short prompts over three tokens, in pages of one: it branches everywhere."""
    tree, rng, page = RadixTree(1), random.Random(seed), 0
    for _ in range(prompts):
        tokens = rng.choices(range(3), k=rng.randint(1, 7))
        tree.insert(tokens, range(page, page + len(tokens)))
        page += len(tokens)
    return tree


def test_blocks_do_not_overlap_and_follow_their_parents() -> None:
    """Against the tree's own paths, and against a grid on which no two blocks may overlap."""
    tree = grown(40)
    laid = {block.node.node: block for block in blocks(tree.nodes())}
    assert len(laid) == len(tree) > 20
    taken: set[tuple[int, int]] = set()
    leaves = 0
    for number, block in laid.items():
        *above, own = tree.path(number)
        assert own == number
        assert block.start == sum(len(laid[node].node.pages) for node in above)
        below = [other for other in laid.values() if tree.path(other.node.node)[:-1] == tree.path(number)]
        leaves += not below
        assert block.rows == (sum(other.rows for other in below) or 1)
        for other in below:
            assert block.row <= other.row < other.row + other.rows <= block.row + block.rows
        area = {(block.start + x, block.row + y) for x in range(len(block.node.pages)) for y in range(block.rows)}
        assert not area & taken
        taken |= area
    assert {row for _, row in taken} == set(range(leaves))


def test_an_empty_tree_is_an_empty_picture() -> None:
    assert blocks(RadixTree(4).nodes()) == []
    axes = Figure().subplots()
    picture(axes, [], str)
    assert list(axes.patches) == []


def test_text_is_shortened_to_its_block() -> None:
    tree = RadixTree(1)
    for number, tokens in enumerate(([*range(10)], [0, *range(11, 16)], [90])):
        tree.insert(tokens, range(10 * number, 10 * number + len(tokens)))
    with matplotlib.rc_context(STYLE):
        axes = Figure(figsize=(6, 2), layout="constrained").subplots()
        picture(axes, tree.nodes(), lambda node: "many words and all of them long " * len(node.pages))
        axes.figure.draw_without_rendering()
    areas = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    texts = [text for text in axes.texts if text.get_text().startswith("m")]
    assert len(areas) == len(tree) == len(texts) == 4
    for area, text in zip(areas, texts, strict=True):
        inside, outside = text.get_window_extent(), area.get_window_extent()
        assert outside.x0 < inside.x0 < inside.x1 <= outside.x1
        assert text.get_text().endswith("\u2026")
        assert inside.width > 0.5 * outside.width  # and no more than necessary


def test_a_picture_shows_every_node_with_its_text_and_locks() -> None:
    tree = RadixTree(2)
    tree.insert([1, 2, 3, 4, 5, 6], [0, 1, 2])
    node = tree.insert([1, 2, 7, 8], [3, 4]).node
    tree.lock(node)
    with matplotlib.rc_context(STYLE):
        axes = Figure(figsize=(6, 2), layout="constrained").subplots()
        picture(axes, tree.nodes(), lambda node: f"tokens {node.tokens}")
        axes.figure.draw_without_rendering()
    areas = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [(*area.get_xy(), area.get_width(), area.get_height()) for area in areas] == [
        (0, 0, 1, 2), (1, 0, 2, 1), (1, 1, 1, 1),
    ]  # fmt: skip
    colors = [matplotlib.colors.to_hex(area.get_facecolor()) for area in areas]
    assert colors == [LOCKED, KEPT, LOCKED]
    said = [text.get_text() for text in axes.texts]
    assert said == [
        "tokens [1, 2]", "1 page, 1 lock", "tokens [3, 4, 5, 6]", "2 pages", "tokens [7, 8]", "1 page, 1 lock",
    ]  # fmt: skip
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 3), (2, 0))
