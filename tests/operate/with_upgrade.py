"""An upgrade behind a proxy loses no request, cuts none, and holds no token back."""

import asyncio
from pathlib import Path

import pytest

from phase6_integration.lab.scale.upgrade import PROXIES, upgrade


@pytest.mark.parametrize("name", PROXIES)
def test_no_request_is_lost_when_a_server_takes_the_place_of_another(name: str, tmp_path: Path) -> None:
    found = asyncio.run(upgrade(name, 40, tmp_path))
    assert found.wrong == []
    assert (found.lost, found.truncated, found.refused) == (0, 0, 0)
    assert min(found.old_requests, found.new_requests) >= 40
    assert found.requests == found.old_requests + found.new_requests
    assert found.events_per_token > 0.5, "tokens were held back"
