"""Addresses of servers: refused before anything is sent when nothing can be reached under them."""

from __future__ import annotations

from urllib.parse import urlsplit

from pancake_langgraph._errors import ConfigError

_ALLOWED = "allowed is an http:// or https:// address with a host, and a port from 1 to 65535 if any"


def require_http_address(name: str, url: object) -> str:
    """Return `url`; `name` is the setting that errors name.  Pure: looks nothing up.

    Raises:
        ConfigError: if it is not an HTTP address, or holds a password (which logs and errors would repeat).
    """
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ConfigError(f"{name}: got {url!r}, {_ALLOWED}")
    problem = _problem_of(url)
    if problem is None:
        return url
    if "@" in url:
        raise ConfigError(f"{name}: got {problem}, {_ALLOWED}")
    raise ConfigError(f"{name}: got {url!r} ({problem}), {_ALLOWED}")


def _problem_of(url: str) -> str | None:
    if not url.isprintable() or " " in url:
        return "a space or control character"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError as exc:  # a broken IPv6 address, a port that is no number, a label that no name server takes
        return str(exc)
    if not host:
        return "no host"
    if port == 0:
        return "port 0"
    if parts.username is not None or parts.password is not None:
        return "an address with a user name or password in it; give them as api_key or in a header"
    return None
