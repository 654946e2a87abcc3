"""How many replicas the autoscaling policy wants."""

from types import SimpleNamespace

import pytest

from phase6_integration.cluster.autoscaling import by_queue_and_pages


@pytest.mark.parametrize(
    ("requests", "pages_used", "replicas"),
    [
        (40, [0.1, 0.1], 4),  # ten requests each
        (0, [], 0),
        (4, [0.8, 0.8], 2),  # few requests, with pools as full as they may be
        (4, [1.0, 1.0], 2.5),
    ],
)
def test_replicas_suffice_for_the_requests_and_for_their_pages(
    requests: int, pages_used: list[float], replicas: float
) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 10)
    metrics = {"pages_used": dict(enumerate(pages_used))}
    context = SimpleNamespace(total_num_requests=requests, aggregated_metrics=metrics, config=config)
    assert by_queue_and_pages(context) == (pytest.approx(replicas), {})
