"""Keys and certificates of both sides, and what it means when they are refused.

A folder holds `ca.pem` (who signs), `cert.pem` and `key.pem` (one side's own), and perhaps `crl.pem` (what was revoked).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

from trainprobe.errors import FormatError, UsageError

CA, CERT, KEY, CRL = "ca.pem", "cert.pem", "key.pem", "crl.pem"
# OpenSSL's number of what is wrong with a certificate → a sentence's end
_WRONG = {
    9: "is not valid yet: do the clocks of both machines agree",
    10: "has expired",
    12: f"cannot be checked, because the list of revoked ones ({CRL}) has expired",
    3: f"cannot be checked, because {CRL} is not from its CA",
    **dict.fromkeys((2, 18, 19, 20, 21), f"is not signed by the CA in {CA}"),
    23: "was revoked",
    26: "was made for the other side",
    **dict.fromkeys((62, 64), "was made for another host name or address"),
}
# what the other side wrote as it closed
_ALERTS = {
    "CERTIFICATE_EXPIRED": "has expired",
    "CERTIFICATE_REVOKED": "was revoked",
    "UNKNOWN_CA": "is not signed by the CA that it trusts",
    "CERTIFICATE_UNKNOWN": "cannot be used",
    "BAD_CERTIFICATE": "cannot be used",
    "UNSUPPORTED_CERTIFICATE": "was made for the other side",
    "CERTIFICATE_REQUIRED": "is missing: name its folder with tls",
}


LINK_ERRORS = (OSError, EOFError, asyncio.TimeoutError, FormatError)  # what ends a connection, and nothing else


class CredentialsError(UsageError):
    """Keys or certificates that cannot be used; the message names the file or the side."""


def context(folder: Path, *, server: bool) -> ssl.SSLContext:
    """Return the TLS 1.3 context of one side, which demands the other side's certificate. Raises CredentialsError."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    for name in (CA, CERT, KEY):
        if not (folder / name).is_file():
            raise CredentialsError(f"there is no {folder / name}: a folder of keys holds {CA}, {CERT} and {KEY}")
    try:
        made.load_verify_locations(folder / CA)
        made.load_cert_chain(folder / CERT, folder / KEY, password=_no_password)
        if (folder / CRL).is_file():
            made.load_verify_locations(folder / CRL)
            made.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except (ssl.SSLError, OSError, ValueError) as error:
        raise CredentialsError(f"the keys in {folder} cannot be used: {getattr(error, 'reason', None) or error}") from None
    return made


def _no_password() -> str:
    raise ValueError(f"{KEY} is encrypted; only a key without a passphrase is read")


def explained(error: BaseException, other: str) -> str:
    """Return what a failed connection means, as a sentence's end. other: who is at the other end, such as "the server"."""
    if isinstance(error, (FormatError, UsageError)):
        return str(error)
    if isinstance(error, ssl.SSLError):
        return _explained_tls(error, other)
    if isinstance(error, socket.gaierror):
        return f"the name of {other} is not known: {error.strerror or error}"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens there: is `trainprobe op-check serve` running ({other})"
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return f"{other} does not answer"
    if isinstance(error, (ConnectionError, EOFError)):
        return f"{other} closed the connection"
    return f"{other} cannot be reached: {getattr(error, 'strerror', None) or error}"


def _explained_tls(error: ssl.SSLError, other: str) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = _WRONG.get(error.verify_code, f"is refused: {error.verify_message}")
        return f"the certificate of {other} {why}"
    reason = (error.reason or str(error)).upper()
    for alert, why in _ALERTS.items():
        if alert in reason:
            return f"{other} refuses this side's certificate: it {why}"
    if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason or "HTTP_REQUEST" in reason:
        return f"{other} does not speak TLS"
    return f"TLS with {other} failed: {reason.replace('_', ' ').lower()}"


def is_about_certificates(error: BaseException) -> bool:
    """Return whether an error is about certificates or TLS, which going on alone does not mend."""
    return isinstance(error, (ssl.SSLError, CredentialsError))
