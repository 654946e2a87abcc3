"""TLS: the certificate of the server, and those of clients if they are asked for."""

import logging
import ssl

from phase0_request.checks import ConfigError
from phase6_integration.api.settings import ServerSettings

NO_PASSWORD = ""  # without one OpenSSL would ask the terminal for it
logger = logging.getLogger("nanoserve")


class Tls:
    """The context of all connections. ConfigError if a file cannot be used."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def reload(self) -> None:
        """Read the files again, for new connections. Files that cannot be used change nothing, and are logged."""
        try:
            self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # on trial: half of a new pair may be there
            self._loaded(self.context)
        except ConfigError as error:
            logger.error("the certificate is kept: %s", error)
        else:
            logger.info("the certificate was read again")

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        settings = self._settings
        assert settings.ssl_certfile is not None
        try:
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=NO_PASSWORD)
        except OSError as error:
            files = ", ".join(filter(None, (settings.ssl_certfile, settings.ssl_keyfile)))
            raise ConfigError(f"ssl_certfile, ssl_keyfile: cannot use {files}: {_reason(error)}") from None
        context.set_alpn_protocols(["http/1.1"])
        if settings.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(settings.ssl_ca_certs)
            except OSError as error:
                raise ConfigError(f"ssl_ca_certs: cannot use {settings.ssl_ca_certs}: {_reason(error)}") from None
            context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
        return context


def _reason(error: OSError) -> str:
    """Why a file is refused. Its own message names a line of C."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it is no PEM file").lower().replace("_", " ")
    return error.strerror or str(error)
