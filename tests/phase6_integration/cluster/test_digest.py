"""A digest, and what routers make of its reports."""

from hypothesis import given
from hypothesis import strategies as st

from phase6_integration.cluster.digest import HISTORY, SNAPSHOT, Digest, DigestView
from phase6_integration.engine.stats import Gauges

IDLE = Gauges()
pages = st.lists(st.integers(0, 20).map(lambda page: page << 59), max_size=4)
# What happens between two reports, and whether a router gets the one that follows.
rounds = st.lists(st.tuples(st.lists(st.tuples(st.booleans(), pages)), st.booleans()), max_size=60)


@given(rounds)
def test_a_router_knows_the_pages_once_a_report_reaches_it_however_many_were_lost(rounds: list) -> None:
    digest, view, pages, lost = Digest(), DigestView(), set[int](), 0
    for happened, arrives in rounds:
        for is_stored, hashes in happened:
            (digest.stored if is_stored else digest.removed)(hashes)
            pages = pages | {*hashes} if is_stored else pages - {*hashes}
        report = digest.report({}, IDLE)
        if not arrives:
            lost += 1
            continue
        before = view.pages.copy()
        if view.apply(report):
            assert view.pages == pages
            lost = 0
        else:
            assert lost >= HISTORY
            assert view.pages == before
            lost += 1
        assert lost < HISTORY + SNAPSHOT
        assert view.apply(report) == (lost == 0), "the same report again changes nothing"


def test_a_report_is_as_small_as_what_has_changed() -> None:
    digest = Digest()
    digest.stored(range(10_000))
    sizes = []
    for page in range(SNAPSHOT - 1):
        digest.removed([page])
        report = digest.report({}, IDLE)
        sizes.append(sum(len(added) + len(removed) for added, removed in report.changes) // 8)
        assert report.whole is None
    assert sizes[0] == 10_000
    assert sizes[-1] == HISTORY
    assert len(digest.report({}, IDLE).whole or b"") == 8 * (10_000 - SNAPSHOT + 1)
