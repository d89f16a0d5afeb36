import json

import pytest
import torch

from fedguild.core.errors import FedGuildError
from fedguild.core.packing import pack, packed_bytes, unpack

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip

AWKWARD = {
    "nothing": ({}, {}),
    "scalars only": ({}, {"a": True, "b": -3, "c": 0.1, "d": 'quote " newline \n é'}),
    "no dimension": ({"adapter/scale": torch.tensor(2.5)}, {}),
    "no element": ({"adapter/empty": torch.zeros(2, 0, 3)}, {"n": 0}),
    "strange names": ({'é/"x"\\\n\x01\x7f': torch.ones(3), "": torch.ones(1)}, {"\t": 1}),
    "every dtype": ({f"part/{dtype}": torch.ones(3, dtype=dtype) for dtype in DTYPES}, {"rounds": 10**18}),
    "offsets of many digits": ({f"layer.{i}": torch.zeros(i, 37) for i in range(40)}, {"t": 1e-9}),
}


@pytest.mark.parametrize("case", AWKWARD)
def test_packed_bytes_is_the_length_of_pack(case):
    tensors, scalars = AWKWARD[case]
    assert packed_bytes(tensors, scalars) == len(pack(tensors, scalars))


@pytest.mark.parametrize("case", AWKWARD)
def test_what_was_packed_comes_back(case):
    tensors, scalars = AWKWARD[case]
    found_tensors, found_scalars = unpack(pack(tensors, scalars))
    assert found_scalars == scalars
    assert {name: type(value) for name, value in found_scalars.items()} == {k: type(v) for k, v in scalars.items()}
    assert list(found_tensors) == sorted(tensors)
    for name, tensor in tensors.items():
        assert found_tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(found_tensors[name], tensor, rtol=0, atol=0)


def test_special_values_and_bits_survive():
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    (found, scalars) = unpack(pack({"x": values}, {"inf": float("inf"), "third": 1 / 3}))
    assert torch.equal(found["x"].view(torch.int32), values.view(torch.int32))
    assert scalars == {"inf": float("inf"), "third": 1 / 3}


def test_slices_shared_tensors_and_gradients_are_packed_by_value():
    stack = torch.arange(24.0).reshape(2, 3, 4).requires_grad_()
    tensors = {
        "slot": stack[:, 1],
        "again": stack,
        "twice": stack,
        "row": stack[0],
        "expanded": stack[0, :1].expand(5, 4),
    }
    found, _ = unpack(pack(tensors, {}))
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_what_has_no_place_in_the_format_is_named():
    with pytest.raises(TypeError, match=r"'gate' is torch\.complex64"):
        pack({"gate": torch.zeros(1, dtype=torch.complex64)}, {})
    with pytest.raises(TypeError, match="'steps' is a list"):
        pack({}, {"steps": [1]})
    with pytest.raises(TypeError, match="'steps' is a list"):
        packed_bytes({}, {"steps": [1]})


GOOD = pack({"adapter/x": torch.arange(5.0)}, {"n": 1})


@pytest.mark.parametrize("length", [0, 5, 8, 30, len(GOOD) - 1])
def test_cut_off_bytes_are_refused(length):
    with pytest.raises(FedGuildError):
        unpack(GOOD[:length])


@pytest.mark.parametrize(
    "data",
    [
        GOOD + b"\0",
        b"\xff" * 64,
        b"\x80\x04K\x01." * 9,
        GOOD.replace(b"F32", b"F99"),
        GOOD.replace(b"[0,20]", b"[0,90]"),
    ],
    ids=["surplus", "huge header", "pickle", "unknown dtype", "wrong offsets"],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(FedGuildError):
        unpack(data)


def test_a_dtype_that_torch_lacks_is_refused():
    header = json.dumps({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    with pytest.raises(FedGuildError, match="unsupported dtype 'F4'"):
        unpack(len(header).to_bytes(8, "little") + header + b"\0")


@pytest.mark.parametrize("text", ["[1]", '{"n":[1]}', '{"n":null}', "{", "[" * 100_000, '{"n":' + "1" * 5000 + "}"])
def test_foreign_scalars_are_refused(text):
    header = json.dumps({"__metadata__": {"scalars": text}}).encode()
    with pytest.raises(FedGuildError, match="its scalars"):
        unpack(len(header).to_bytes(8, "little") + header)


def test_a_plain_safetensors_file_has_no_scalars():
    from safetensors.torch import save

    tensors, scalars = unpack(save({"x": torch.ones(2)}))
    assert (tensors["x"].tolist(), scalars) == ([1, 1], {})


def test_tensors_are_counted_before_they_are_parsed(monkeypatch):
    many = pack({f"a/{number}": torch.zeros(0) for number in range(500)}, {})
    assert len(unpack(many)[0]) == len(unpack(many, 500)[0]) == 500
    monkeypatch.setattr("fedguild.core.packing.from_json", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(FedGuildError, match=r"its header has 50\d objects, but 100 tensors are expected at most"):
        unpack(many, 100)
