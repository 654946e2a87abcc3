"""by_queue_and_pages: how many replicas there should be, for `autoscaling_config: {policy: {policy_function: ...}}`.

Ray Serve scales by requests. A few long ones can fill the pools, too, and then requests wait that are not many.
"""

from typing import Any

PAGES = 0.8  # the share of a pool that requests should use at most


def by_queue_and_pages(context: Any) -> tuple[float, dict[str, Any]]:
    """The replicas for `target_ongoing_requests` each, and for pools that are no fuller than PAGES. Ray Serve
    applies its delays and bounds to the number."""
    shares = (context.aggregated_metrics or {}).get("pages_used", {}).values()
    return max(context.total_num_requests / context.config.get_target_ongoing_requests(), sum(shares) / PAGES), {}
