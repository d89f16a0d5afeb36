"""A program that registers and revokes clients' keys with Flower's server, any number of them over one connection.

Flower's own command starts a Python process for every key, which takes seconds. This one reads a JSON object from its
standard input and writes a line of JSON for every key: its name, and why it was not accepted or found, empty if it was.

    {"register": {"client-000": "nodes/client-000.pub"}, "revoke": ["client-001"]}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

from fedguild.federation.revocation import SPENT, UNKNOWN

USED = "already"
"""In what Flower answers to a public key that it has had before."""


def main(connection: str, work: Mapping[str, Any], write: Callable[[str], None]) -> None:
    """Executes the request of a JSON object.

    Args:
        connection: The name of the server in Flower's config.
        work: `register`, name -> path of a public key; `revoke`, names.
    """
    client = init_http_client_from_connection(read_superlink_connection(connection))
    try:
        for name, path in work.get("register", {}).items():
            write(_line(name, partial(_register, client, name, Path(path))))
        for name in work.get("revoke", []):
            write(_line(name, partial(_revoke, client, name)))
    finally:
        client.close()


def _register(client: Any, name: str, path: Path) -> str:
    key = _public_key(path)
    try:
        with flwr_cli_exc_handler():
            client.RegisterNode(request=RegisterNodeRequest(public_key=key, name=name))
    except Exception as error:
        if USED not in f"{getattr(error, 'message', '')} {error}":
            raise
        if not any(node.public_key == key for node in _nodes(client, name)):
            return SPENT
    for node in _nodes(client, name):
        if node.public_key != key:
            client.UnregisterNode(request=UnregisterNodeRequest(node_id=node.node_id))
    return ""


def _public_key(path: Path) -> bytes:
    """Returns a client's public key in the form of Flower's server.

    Flower's own function for this ends the whole process a few seconds after it meets a bad key.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no public key on a NIST curve.
        cryptography.exceptions.UnsupportedAlgorithm: it holds a key of an unknown kind.
    """
    key = load_ssh_public_key(path.read_bytes())
    if not isinstance(key, ec.EllipticCurvePublicKey) or not uses_nist_ec_curve(key):
        raise ValueError(f"{path} has no key on a NIST curve, as `fedguild federation key` writes one.")
    return public_key_to_bytes(key)


def _revoke(client: Any, name: str) -> str:
    with flwr_cli_exc_handler():
        nodes = _nodes(client, name)
        for node in nodes:
            client.UnregisterNode(request=UnregisterNodeRequest(node_id=node.node_id))
    return "" if nodes else UNKNOWN


def _nodes(client: Any, name: str) -> list[Any]:
    """Returns what Flower knows of the registered nodes of a name."""
    every = client.ListNodes(ListNodesRequest()).nodes_info
    return [node for node in every if node.name == name and not node.unregistered_at]


def _line(name: str, work: Callable[[], str]) -> str:
    """Returns the line of one key; an error with one key does not affect the others."""
    try:
        fault = work()
    except Exception as error:
        fault = " ".join(f"{getattr(error, 'message', '')} {error}".split()) or type(error).__name__
    return json.dumps({"name": name, "fault": fault})


if __name__ == "__main__":
    main(sys.argv[1], json.load(sys.stdin), lambda line: print(line, flush=True))
