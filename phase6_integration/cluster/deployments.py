"""The application of Ray Serve: fronts and replicas, from the arguments in a configuration file.

The file is Ray Serve's own (`serve deploy` reads the same). What it says of deployments there, such as `num_replicas`,
`autoscaling_config` and `ray_actor_options`, replaces what is said here.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingContext, RequestRouterConfig

from phase6_integration.cluster.arguments import settings_of

IMPORT_PATH = "phase6_integration.cluster.deployments:application"
ROUTER = "phase6_integration.cluster.ray_router:PrefixRouter"
PAGES = 0.8  # the share of a pool that requests should use at most
REPORTS = 0.5  # seconds between two reports of a replica


def application(args: Mapping[str, Any]) -> Application:
    """Build the application, without loading anything. ValueError for a wrong argument."""
    from phase6_integration.cluster.front import Front
    from phase6_integration.cluster.replica import Replica

    options, settings = settings_of(args)
    replicas = serve.deployment(
        Replica,
        name="Replica",
        # More wait in fronts, for whichever is free first.
        max_ongoing_requests=2 * options.running(on_gpu=options.device != "cpu"),
        request_router_config=RequestRouterConfig(request_router_class=ROUTER, request_routing_stats_period_s=REPORTS),
        health_check_period_s=2,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
    )
    fronts = serve.deployment(
        Front,
        name="Front",
        max_ongoing_requests=1 << 16,  # AsyncEngine has its own limit, whose answer is a 429
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
    )
    return fronts.bind(options, settings, replicas.bind(options))


def by_queue_and_pages(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """A policy for `autoscaling_config`: the replicas for `target_ongoing_requests` each, and for pools that are no
    fuller than PAGES. Ray Serve applies its delays and bounds to the number."""
    shares = (context.aggregated_metrics or {}).get("pages_used", {}).values()
    return max(context.total_num_requests / context.config.get_target_ongoing_requests(), sum(shares) / PAGES), {}
