"""The arguments of an application in a configuration file."""

import pytest

from phase6_integration.cluster.arguments import settings_of


def test_arguments_are_the_flags_of_serve_in_the_types_of_yaml() -> None:
    options, settings = settings_of(
        {"kv_cache_pages": 64, "dtype": "auto", "served_model_name": "m", "request_timeout": 5, "max_model_len": "auto"}
    )
    assert (options.kv_cache_pages, options.dtype, options.max_model_len) == (64, None, None)
    assert (settings.served_model_names, settings.request_timeout) == (("m",), 5)
    assert settings_of({"served_model_name": ["m", "n"]})[1].served_model_names == ("m", "n")
    assert settings_of({})[1].served_model_names == ("tiny_chat",)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"kv_cache_page": 64}, r"no argument 'kv_cache_page' \(did you mean kv_cache_pages\?\)"),
        ({"kv_cache_pages": "64 pages"}, "kv_cache_pages must be an integer"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer from 1"),
        ({"port": 8000}, "port: Ray Serve listens, so that is set in http_options"),
        ({"log_format": "json"}, "log_format: Ray Serve writes the logs"),
        ({"max_engine_restarts": 3}, "max_engine_restarts: Ray Serve replaces a replica"),
        ({"send_timeout": 3}, "send_timeout: Ray Serve listens"),
        ({"api_key_file": "there is none"}, "there is none"),
    ],
)
def test_a_wrong_argument_is_named(args: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(args)
