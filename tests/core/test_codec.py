import pytest
import torch

from fedguild.core.codec import decode, encode
from fedguild.core.errors import UploadError
from fedguild.core.payload import Payload, with_part


def payload() -> Payload:
    tensors = with_part("adapter", {"q.lora_A": torch.arange(6.0).reshape(2, 3), "q.lora_B": torch.zeros(3, 2)})
    tensors |= with_part("activation", {"block": torch.tensor([0.25, 0.75], dtype=torch.bfloat16)})
    return Payload(tensors, {"examples": 12, "client": "client-001", "loss": 0.5, "last": False})


def test_a_payload_survives_the_wire():
    found = decode(encode(payload()))
    assert found.scalars == payload().scalars
    assert found.tensors.keys() == payload().tensors.keys()
    assert found.part("activation")["block"].dtype == torch.bfloat16
    assert found.part("adapter")["q.lora_A"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_encoding_what_was_decoded_gives_the_same_bytes():
    assert encode(decode(encode(payload()))) == encode(payload())


def test_damaged_bytes_name_their_source_and_what_is_wrong():
    data = encode(payload())
    with pytest.raises(
        UploadError, match=rf"client-001's upload of {len(data) - 3} bytes cannot be decoded: .*not fully"
    ):
        decode(data[:-3], source="client-001's upload")


def test_a_pickle_is_refused():
    import pickle

    with pytest.raises(UploadError, match="cannot be decoded"):
        decode(pickle.dumps({"adapter/x": [1.0] * 50}))
