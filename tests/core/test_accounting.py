import torch

from fedguild.core.accounting import Traffic, bytes_by_part, count_traffic, size_bytes
from fedguild.core.codec import encode
from fedguild.core.payload import Payload

UPLOAD = Payload(
    {
        "adapter/q.lora_A": torch.zeros(4, 8),
        "adapter/q.lora_B": torch.zeros(8, 4, dtype=torch.bfloat16),
        "activation/block": torch.zeros(16),
        "loose": torch.zeros(3, dtype=torch.uint8),
    },
    {"examples": 7},
)


def test_size_is_the_length_of_the_encoding():
    for payload in (UPLOAD, Payload(), Payload(scalars={"only": "text"})):
        assert size_bytes(payload) == len(encode(payload))


def test_parts_sum_to_the_size():
    parts = bytes_by_part(UPLOAD)
    header_bytes = len(encode(UPLOAD)) - (128 + 64 + 64 + 3)
    assert parts == {"activation": 64, "adapter": 128 + 64, "header": header_bytes, "loose": 3}
    assert sum(parts.values()) == size_bytes(UPLOAD)


def test_traffic_of_a_client_in_a_round():
    traffic = count_traffic(2, 5, Payload({"adapter/x": torch.zeros(100)}), UPLOAD)
    assert (traffic.round, traffic.client) == (2, 5)
    assert traffic.download_by_part["adapter"] == 400
    assert traffic.upload_bytes == len(encode(UPLOAD))
    assert traffic.download_bytes == len(encode(Payload({"adapter/x": torch.zeros(100)})))


def test_a_client_that_never_answered_sent_nothing():
    traffic = count_traffic(1, 0, UPLOAD, None)
    assert traffic == Traffic(1, 0, bytes_by_part(UPLOAD))
    assert traffic.upload_bytes == 0
    assert traffic.download_bytes > 0
