"""Certificates for a test: a CA of one's own and the keys of both sides, and the list of what was revoked."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainprobe.errors import MissingExtra, OutputError, UsageError
from trainprobe.op_check.online.credentials import CA, CERT, CRL, KEY

SIDES = ("server", "training")


def make(folder: Path, hosts: Sequence[str] = (), days: float = 30.0) -> None:
    """Write `ca/`, `server/` and `training/` into a folder. hosts: names and addresses by which the training calls the server.

    Raises OutputError where the folder has keys already or cannot be written, MissingExtra without `cryptography`.
    """
    ca = _Authority()
    if (folder / "ca").exists():
        raise OutputError(f"{folder} has keys already: name another folder, or remove it")
    names = [*dict.fromkeys(["localhost", "127.0.0.1", "::1", socket.gethostname(), *hosts])]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ca.create(days)
        ca.write(folder / "ca")
        for side in SIDES:
            ca.issue(folder / side, side, names if side == "server" else [], days)
            shutil.copy(folder / "ca" / CERT, folder / side / CA)
        _share(ca.revoked([], days), folder)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error}") from error


def revoke(folder: Path, side: str, days: float = 30.0) -> None:
    """Add a side's certificate to the list of revoked ones that both sides have. Raises UsageError, OutputError."""
    if side not in SIDES:
        raise UsageError(f"{side!r} is no side: {' or '.join(SIDES)}")
    ca = _Authority()
    try:
        ca.read(folder / "ca")
        _share(ca.revoked([folder / side / CERT], days, folder / "ca" / CRL), folder)
    except (OSError, ValueError) as error:
        raise OutputError(f"{folder} cannot be used as a folder of `trainprobe op-check certs`: {error}") from error


def _share(crl: bytes, folder: Path) -> None:
    for name in ("ca", *SIDES):
        (folder / name / CRL).write_bytes(crl)


class _Authority:
    """A CA: its key signs certificates and the list of revoked ones. Elliptic keys on P-256."""

    def __init__(self) -> None:
        try:
            import cryptography.x509 as x509
            from cryptography.hazmat.primitives import hashes, serialization
            from cryptography.hazmat.primitives.asymmetric import ec
        except ImportError:
            raise MissingExtra("cryptography", "certs", "making certificates") from None
        self._x509: Any = x509
        self._hash: Any = hashes.SHA256()
        self._serialization: Any = serialization
        self._ec: Any = ec
        self._key: Any = None
        self._cert: Any = None

    def create(self, days: float) -> None:
        """Make the CA's own key and certificate."""
        self._key, name = self._new_key(), self._name("trainprobe test CA")
        usage = self._x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        identity = self._x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = self._builder(name, name, self._key, days).add_extension(self._x509.BasicConstraints(True, 0), critical=True)
        self._cert = builder.add_extension(usage, critical=True).add_extension(identity, False).sign(self._key, self._hash)

    def read(self, folder: Path) -> None:
        """Read what `write` wrote. Raises OSError, ValueError."""
        self._key = self._serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
        self._cert = self._x509.load_pem_x509_certificate((folder / CERT).read_bytes())

    def write(self, folder: Path) -> None:
        """Write the CA's own files."""
        _write(folder, self._pem(self._cert), self._private(self._key))

    def issue(self, folder: Path, side: str, hosts: Sequence[str], days: float) -> None:
        """Make and write the key and certificate of one side."""
        key = self._new_key()
        usages = self._x509.oid.ExtendedKeyUsageOID
        usage = self._x509.ExtendedKeyUsage([usages.SERVER_AUTH if side == "server" else usages.CLIENT_AUTH])
        builder = self._builder(self._name(f"trainprobe {side}"), self._cert.subject, key, days).add_extension(usage, False)
        signer = self._x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(self._x509.BasicConstraints(False, None), critical=True).add_extension(signer, False)
        if hosts:
            builder = builder.add_extension(self._x509.SubjectAlternativeName([*map(self._host, hosts)]), False)
        _write(folder, self._pem(builder.sign(self._key, self._hash)), self._private(key))

    def revoked(self, certificates: Sequence[Path], days: float, before: Path | None = None) -> bytes:
        """Return the list of revoked certificates, signed. before: an earlier list, whose entries stay."""
        now = _now()
        builder = self._x509.CertificateRevocationListBuilder().issuer_name(self._cert.subject).last_update(now)
        builder = builder.next_update(now + datetime.timedelta(days=max(days, 1.0)))
        for entry in self._x509.load_pem_x509_crl(before.read_bytes()) if before is not None else ():
            builder = builder.add_revoked_certificate(entry)
        for path in certificates:
            number = self._x509.load_pem_x509_certificate(path.read_bytes()).serial_number
            entry = self._x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now).build()
            builder = builder.add_revoked_certificate(entry)
        return self._pem(builder.sign(self._key, self._hash))

    def _builder(self, name: Any, issuer: Any, key: Any, days: float) -> Any:
        builder = self._x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
        start = _now() - datetime.timedelta(hours=1) + min(datetime.timedelta(), datetime.timedelta(days=days))
        builder = builder.serial_number(self._x509.random_serial_number()).not_valid_before(start)
        return builder.not_valid_after(_now() + datetime.timedelta(days=days))

    def _host(self, host: str) -> Any:
        try:
            return self._x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return self._x509.DNSName(host)

    def _name(self, text: str) -> Any:
        return self._x509.Name([self._x509.NameAttribute(self._x509.oid.NameOID.COMMON_NAME, text)])

    def _new_key(self) -> Any:
        return self._ec.generate_private_key(self._ec.SECP256R1())

    def _pem(self, signed: Any) -> bytes:
        return signed.public_bytes(self._serialization.Encoding.PEM)

    def _private(self, key: Any) -> bytes:
        kinds = self._serialization
        return key.private_bytes(kinds.Encoding.PEM, kinds.PrivateFormat.PKCS8, kinds.NoEncryption())


def _write(folder: Path, certificate: bytes, key: bytes) -> None:
    folder.mkdir(mode=0o700)
    (folder / CERT).write_bytes(certificate)
    handle = os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(key)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
