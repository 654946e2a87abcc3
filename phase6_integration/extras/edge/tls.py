"""TLS: the certificate of the server, and client certificates if they are required."""

import ssl

from phase0_request.support.checks import ConfigError
from phase6_integration.extras.edge.edge_settings import EdgeSettings

NO_PASSWORD = ""  # without one OpenSSL would ask the terminal for it


def tls_context(settings: EdgeSettings) -> ssl.SSLContext:
    """The context of all connections. ConfigError if a file cannot be used."""
    certificate, key, authorities = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs
    assert certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=NO_PASSWORD)
        if authorities is not None:
            context.load_verify_locations(authorities)
            context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    except OSError as error:  # it does not say which file, and one of OpenSSL names a line of C
        reason = (error.reason or "it is no PEM file") if isinstance(error, ssl.SSLError) else error.strerror
        files = ", ".join(filter(None, (certificate, key, authorities)))
        raise ConfigError(f"cannot use {files} for TLS: {str(reason).replace('_', ' ').lower()}") from None
    return context
