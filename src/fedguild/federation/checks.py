"""Checks of a federation before it starts: each fault in one sentence, with a hint on how to fix it."""

from __future__ import annotations

import contextlib
import errno
import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedguild.config import load_config
from fedguild.core.errors import ConfigError, DataError, FedGuildError
from fedguild.core.plugins import installed
from fedguild.data.corpora.source import locate
from fedguild.export.gguf import require_converter
from fedguild.federation.site import SITE_FILE, ServerSettings, SiteSettings

FLWR = ("1.41", "1.42")
CONNECT_SECONDS = 5.0
SOON = timedelta(days=30)
"""Before a certificate expires within this, its operator is warned."""
AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 300.0
"""Flower refuses a client whose clock is further from the server's."""
FREED_SECONDS = 10.0
"""What a killed parent had started ends after it, at the latest by `watchdog`'s second signal; so long a port waits."""
INSTALL = "pip install 'fedguild[flower]'"


@dataclass(frozen=True)
class Fault:
    """A fault that keeps a federation from working.

    Attributes:
        hint: The remedy.
        fatal: Whether starting is pointless.
    """

    message: str
    hint: str
    fatal: bool = True


def require_none(faults: Iterator[Fault]) -> list[Fault]:
    """Returns the faults if none is fatal.

    Raises:
        ConfigError: some are fatal; the message has a line for each.
    """
    listed = list(faults)
    fatal = [fault for fault in listed if fault.fatal]
    if fatal:
        raise ConfigError("\n".join(fault.message for fault in fatal), "\n".join(fault.hint for fault in fatal))
    return listed


def version_faults() -> Iterator[Fault]:
    flwr = installed("flwr")
    if flwr is None:
        yield Fault("Flower (flwr) is not installed.", INSTALL)
    elif flwr.rpartition(".")[0] not in FLWR:
        yield Fault(f"Flower {flwr} is installed, but FedGuild needs {' or '.join(FLWR)}.", INSTALL)


def server_faults(folder: Path, settings: ServerSettings) -> Iterator[Fault]:
    """Yields faults of a server's folder and machine."""
    yield from version_faults()
    try:
        clients = load_config(str(folder / settings.run)).federation.clients
    except FedGuildError as error:
        yield Fault(error.message, error.hint)
        clients = 0
    files = [folder / name for name in (settings.ca_certificate, settings.certificate, settings.key)]
    missing = [
        Fault(f"{path} is missing.", "`fedguild federation init` creates an example.")
        for path in files
        if not path.is_file()
    ]
    yield from missing
    if not missing and installed("cryptography"):
        yield from certificate_faults(*files)
    keys = sorted((folder / settings.nodes).glob("*.pub"))
    if len(keys) < clients:
        yield Fault(
            f"{folder / settings.nodes} has {len(keys)} public key(s), but the run has {clients} clients.",
            "Put each client's key there as client-000.pub and so on, and start again.",
            fatal=not keys,
        )
    yield from listening_faults(settings)


def listening_faults(settings: ServerSettings) -> Iterator[Fault]:
    """Yields faults of the addresses at which a server listens: for clients, and for this machine alone."""
    if not is_loopback(settings.host) and settings.opens is None:
        yield Fault(
            f"host in server.yaml is {settings.host}: whoever reaches this machine would reach Flower's interface for "
            "clients (/v1/fleet/, for registered keys only).",
            "If that is wanted, write `opens: fleet` beside it; otherwise use `host: 127.0.0.1`.",
        )
    if settings.control_port == settings.port:
        yield Fault(
            f"port and control_port in server.yaml are both {settings.port}.",
            "Choose another control_port: it is for this machine alone.",
        )
        return
    yield from port_faults(settings.host, settings.port, "port in server.yaml")
    yield from port_faults("127.0.0.1", settings.control_port, "control_port in server.yaml")


def is_loopback(host: str) -> bool:
    """Whether a listening address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def site_faults(folder: Path, site: SiteSettings) -> Iterator[Fault]:
    """Yields faults of a client's folder and machine, and of the connection to the server."""
    yield from version_faults()
    yield from data_faults(folder, site)
    if site.model_format == "gguf":
        try:
            require_converter()
        except FedGuildError as error:
            yield Fault(f"model_format in site.yaml is gguf. {error.message}", error.hint)
    key, authority = folder / site.key, folder / site.ca_certificate
    if site.accept.secure and not any((folder / site.peers).glob("client-*.pub")):
        yield Fault(
            f"{folder / site.peers} has no public keys of the other clients, which accept.secure needs.",
            "Put them there as client-000.pub and so on; get them from their operators, not from the server.",
        )
    if not key.is_file():
        yield Fault(f"The private key {key} is missing.", f"`fedguild federation key {key}` creates one.")
    elif key.stat().st_mode & 0o077:
        yield Fault(f"Other users of this machine can read the private key {key}.", f"chmod 600 {key}", fatal=False)
    if not authority.is_file():
        yield Fault(f"The authority's certificate {authority} is missing.", "Ask the server's operator for ca.pem.")
    else:
        if installed("cryptography"):
            yield from _dates("The authority's certificate", authority)
        yield from connection_faults(site.server, authority)
    yield from port_faults("127.0.0.1", site.port, "port in site.yaml")


def data_faults(folder: Path, site: SiteSettings) -> list[Fault]:
    """Returns a fault for each source of a site's data that is not where its settings say."""
    faults = []
    for name in ("train", "test"):
        if (given := getattr(site.data, name)) is None:
            continue
        try:
            with contextlib.chdir(folder):
                locate(given)
        except DataError as error:
            hint = f"Put this site's examples there, or change data.{name} in {folder / SITE_FILE}."
            faults.append(Fault(error.message, hint))
    return faults


def connection_faults(server: str, authority: Path) -> Iterator[Fault]:
    """Yields faults of the connection to the server: no answer, another authority, another name, a wrong clock."""
    host, _, port = server.rpartition(":")
    try:
        trust = ssl.create_default_context(cafile=str(authority))
    except ssl.SSLError:
        yield Fault(f"{authority} is not a certificate in PEM form.", "Ask the server's operator for ca.pem.")
        return
    connection = http.client.HTTPSConnection(host, int(port), timeout=CONNECT_SECONDS, context=trust)
    try:
        connection.request("HEAD", "/v1/fleet/")
        date = connection.getresponse().getheader("Date")
    except ssl.SSLCertVerificationError as error:
        yield _untrusted(server, authority, error)
    except (OSError, http.client.HTTPException) as error:
        yield Fault(
            f"Nothing answers at {server} ({error}).",
            "Start `fedguild federation server` there, or check `server` in site.yaml; the client keeps trying.",
            fatal=False,
        )
    else:
        if date:
            yield from clock_faults(parsedate_to_datetime(date), datetime.now(UTC))
    finally:
        connection.close()


def clock_faults(theirs: datetime, ours: datetime) -> Iterator[Fault]:
    """Yields a fault if this machine's clock is too far from the server's for Flower."""
    ahead = (ours - theirs).total_seconds()
    if ahead > AHEAD_SECONDS or ahead < -BEHIND_SECONDS:
        direction = "ahead of" if ahead > 0 else "behind"
        yield Fault(
            f"This machine's clock is {abs(ahead):.0f} s {direction} the server's; Flower accepts at most "
            f"{AHEAD_SECONDS:.0f} s ahead and {BEHIND_SECONDS:.0f} s behind.",
            "Set the clocks by NTP on both machines.",
        )


def certificate_faults(authority: Path, certificate: Path, key: Path) -> Iterator[Fault]:
    """Yields faults of a server's certificate: its dates, another authority, another key."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    yield from _dates("The authority's certificate", authority)
    yield from _dates("The server's certificate", certificate)
    try:
        signer, signed = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (authority, certificate))
        private = load_pem_private_key(key.read_bytes(), None)
    except (ValueError, TypeError) as error:
        yield Fault(f"{authority}, {certificate} or {key} is not in PEM form ({error}).", "Create them again.")
        return
    try:
        signed.verify_directly_issued_by(signer)
    except (ValueError, TypeError, InvalidSignature):
        yield Fault(
            f"{certificate} was not signed by the authority in {authority}.",
            "Use the authority that signed it, or let this one sign a new certificate.",
        )
    if signed.public_key() != private.public_key():
        yield Fault(f"{key} is not the key of {certificate}.", "Use a certificate and the key that belongs to it.")
    try:
        names = signed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    except x509.ExtensionNotFound:
        addresses = []
    if "127.0.0.1" not in addresses:
        yield Fault(
            f"{certificate} is not for 127.0.0.1, where the server's own programs reach it.",
            "Add IP:127.0.0.1 to its names (subjectAltName), beside the name that clients use.",
        )


def port_faults(host: str, port: int, where: str) -> Iterator[Fault]:
    """Yields a fault if something listens on a port and does not end soon, as the children of a killed parent do."""
    deadline = time.monotonic() + FREED_SECONDS
    while True:
        try:
            with socket.create_server((host, port)):
                return
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            yield Fault(
                f"Cannot listen on port {port} of {host}: {error.strerror or error}.",
                f"Stop the program that uses it (perhaps an earlier start of this command), or change {where}.",
            )
            return


def _dates(what: str, path: Path) -> Iterator[Fault]:
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        yield Fault(f"{path} is not a certificate in PEM form.", "Put the right file there.")
        return
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        yield Fault(f"{what} {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}.", "Renew it, on both sides.")
    elif now < certificate.not_valid_before_utc:
        yield Fault(
            f"{what} {path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC.",
            "Check this machine's clock.",
        )
    elif (left := certificate.not_valid_after_utc - now) < SOON:
        yield Fault(
            f"{what} {path} expires on {certificate.not_valid_after_utc:%Y-%m-%d}, in {left.days} days.",
            "Every site needs the authority's next certificate before, and the server one that it signed."
            if certificate.subject == certificate.issuer
            else "Have its authority sign another; `sh make.sh` beside it does that for the example authority.",
            fatal=False,
        )


def _untrusted(server: str, authority: Path, error: ssl.SSLCertVerificationError) -> Fault:
    reason = error.verify_message or str(error)
    if "expired" in reason:
        return Fault(f"The certificate of {server} has expired.", "Its operator has to renew it.")
    if "mismatch" in reason or "doesn't match" in reason:
        return Fault(
            f"The certificate of {server} is for a different name ({reason}).",
            "Its operator has to put this name into the certificate, or use the name that is in it.",
        )
    return Fault(
        f"The certificate of {server} was signed by an authority other than {authority} ({reason}).",
        "Ask the server's operator for the authority's certificate, ca.pem.",
    )
