"""The manifests of `phase6_integration/deploy`: Kubernetes' own schemas, and names that must agree between them."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "phase6_integration/deploy"
CORE = [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())]
POOL, ROUTE = yaml.safe_load_all((DEPLOY / "inference-pool.yaml").read_text())


def of(kind: str) -> dict[str, Any]:
    (found,) = [one for one in CORE if one["kind"] == kind]
    return found


POD = of("Deployment")["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}


@pytest.mark.parametrize("one", CORE, ids=lambda one: one["kind"])
def test_kubernetes_takes_it(one: dict[str, Any]) -> None:
    kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            one | {"spec": one["spec"] | {"no": 1}}, kubernetes_validate.latest_version(), True
        )


def test_names_and_ports_agree() -> None:
    service, policy = of("Service")["spec"], of("NetworkPolicy")["spec"]
    pods = [of("Deployment")["spec"]["selector"], of("PodDisruptionBudget")["spec"]["selector"], policy["podSelector"]]
    selectors = [*(one["matchLabels"] for one in pods), service["selector"], POOL["spec"]["selector"]["matchLabels"]]
    assert all(one.items() <= POD["metadata"]["labels"].items() for one in selectors)
    used = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    probes = {CONTAINER[name]["httpGet"]["port"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert used | probes | {service["ports"][0]["targetPort"]} == PORTS.keys()
    assert POOL["spec"]["targetPorts"] == [{"number": PORTS["http"]}]
    (backend,) = ROUTE["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (POOL["kind"], POOL["metadata"]["name"])
    assert backend["group"] == POOL["apiVersion"].partition("/")[0]
    (allowed,) = policy["ingress"][1]["from"]
    assert allowed["podSelector"]["matchLabels"] == {"inferencepool": POOL["spec"]["endpointPickerRef"]["name"]}


def test_a_pod_has_the_time_to_drain() -> None:
    pause = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    (drain,) = [int(flag.partition("=")[2]) for flag in CONTAINER["args"] if flag.startswith("--shutdown-timeout")]
    assert pause + drain < POD["spec"]["terminationGracePeriodSeconds"]
