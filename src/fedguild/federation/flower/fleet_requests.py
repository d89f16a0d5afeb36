"""The parts of requests to the fleet's interface of Flower's server that the gateway inspects."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterable
from functools import lru_cache

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from google.protobuf.message import DecodeError

PUSH_MESSAGES = "/v1/fleet/push-messages"
_FLOWERS = b"flwr-"
_LONGEST_HEADER_BYTES = 4096

Headers = Iterable[tuple[bytes, bytes]]


def repeats(headers: Headers) -> bool:
    """Whether one of Flower's headers occurs twice: the gateway and Flower's server might read different ones."""
    names = [name.lower() for name, _ in headers if name.lower().startswith(_FLOWERS)]
    return len(names) > len(set(names))


def signer(headers: Headers) -> bytes | None:
    """Returns the public key that signed a request, in PEM; None if it is not signed by the key that it names.

    The request must not repeat a header of Flower's (`repeats`). Flower's server checks whether the key is registered
    and the signature fresh.
    """
    given = {name.lower().decode("latin-1"): value for name, value in headers if len(value) <= _LONGEST_HEADER_BYTES}
    try:
        key = b64decode(given[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        signature = b64decode(given[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        return key if verify_signature(_parsed(key), given[TIMESTAMP_HEADER], signature) else None
    except (KeyError, ValueError, TypeError, UnsupportedAlgorithm, binascii.Error):
        return None


@lru_cache(maxsize=1024)
def _parsed(key: bytes) -> EllipticCurvePublicKey:
    public = bytes_to_public_key(key)
    if not isinstance(public, EllipticCurvePublicKey):
        raise ValueError("not a key of a node")
    return public


def fault_of_push(body: bytes) -> str:
    """Returns why a request to push messages is refused; empty if it is not.

    Flower's server compares the key with the node that the request names, but not with the sender that each message
    names.
    """
    request = PushMessagesRequest()
    try:
        request.ParseFromString(body)
    except DecodeError:
        return "The request cannot be read."
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return "A request pushes one message."
    metadata = request.messages_list[0].metadata
    if metadata.src_node_id != request.node.node_id:
        return "The message names another node as its sender."
    return "" if metadata.reply_to_message_id else "The message answers nothing."
