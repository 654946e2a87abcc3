"""The application of Ray Serve: fronts and replicas, from the arguments in a configuration file.

The file is Ray Serve's own (`serve deploy` reads the same). What it says of deployments there, such as `num_replicas`,
`autoscaling_config` and `ray_actor_options`, replaces what is said here.
"""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from phase6_integration.cluster.arguments import settings_of

IMPORT_PATH = "phase6_integration.cluster.deployments:application"
ROUTER = "phase6_integration.cluster.ray_router:PrefixRouter"
REPORTS = 0.5  # seconds between two reports of a replica


def application(args: Mapping[str, Any]) -> Application:
    """Build the application, without loading anything. ValueError for a wrong argument."""
    from phase6_integration.cluster.front import Front
    from phase6_integration.cluster.replica import Replica

    options, settings = settings_of(args)
    replicas = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=2 * (options.max_num_seqs or 64),  # more wait in fronts, for whichever is free first
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
