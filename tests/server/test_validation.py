import pytest
import torch

from fedguild.core.errors import UploadError
from fedguild.core.payload import Payload
from fedguild.server.schema import Bound, Entry, Schema, entries
from fedguild.server.validation import Envelope, check_envelope, check_upload

EXPECTED = {"adapter/a": (2, 3), "adapter/b": (4,), "adapter/scale": ()}
SCHEMA = Schema({name: Entry(shape) for name, shape in EXPECTED.items()})


def upload(**changes) -> Payload:
    tensors = {name: torch.ones(shape) for name, shape in EXPECTED.items()}
    tensors |= {f"adapter/{name}": value for name, value in changes.items()}
    return Payload({name: value for name, value in tensors.items() if value is not None}, {"examples": 3})


def refusal(payload: Payload, **options) -> str:
    with pytest.raises(UploadError) as caught:
        check_upload(payload, SCHEMA, **options)
    return caught.value.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_was_asked_for_passes_in_any_floating_dtype(dtype):
    check_upload(upload(a=torch.ones(2, 3, dtype=dtype)), SCHEMA, norm_limit=3.4)


def test_missing_and_unknown_names_are_both_listed():
    assert refusal(upload(b=None, c=torch.ones(1))) == (
        "the upload lacks 'adapter/b' and has unknown 'adapter/c'; expected 3 tensors."
    )


def test_a_wrong_shape_is_named():
    assert refusal(upload(a=torch.ones(3, 2))) == "'adapter/a' has the shape [3, 2], but [2, 3] is expected."
    assert "'adapter/scale' has the shape [1], but [] is expected." in refusal(upload(scale=torch.ones(1)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_wrong_dtype_is_named(dtype):
    message = refusal(upload(b=torch.ones(4, dtype=dtype)))
    assert message.startswith(f"'adapter/b' is {str(dtype)[6:]}, but one of float32,")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_a_number_and_infinity_are_counted(bad, dtype):
    values = torch.tensor([1.0, bad, 2.0, bad], dtype=dtype)
    assert refusal(upload(b=values)) == "'adapter/b' has NaN or infinity in 2 of its 4 values."


def test_the_norm_limit_is_on_all_tensors_together():
    check_upload(upload(), SCHEMA, norm_limit=11**0.5 + 1e-6)
    message = refusal(upload(), norm_limit=3.3)
    assert message == (
        "the upload's norm is 3.31662, beyond the limit of 3.3 (federation.max_update_norm); "
        "most of it is in 'adapter/a' (2.44949)."
    )


def test_a_scalar_that_is_not_finite_is_named():
    payload = Payload(upload().tensors, {"examples": 3, "loss": float("nan")})
    assert refusal(payload) == "the scalar 'loss' is nan, but a finite number is expected."


def test_a_tensor_that_may_be_left_out_is_checked_where_it_is_there():
    expected = Schema({"routing": Entry((2,)), **entries("update", {"1": (3,), "2": (3,)}, omissible=True)})
    whole = {name: torch.ones(shape) for name, shape in expected.shapes.items()}
    for left_out in ([], ["update/1"], ["update/1", "update/2"]):
        tensors = {name: value for name, value in whole.items() if name not in left_out}
        check_upload(Payload(tensors), expected, norm_limit=8**0.5 + 1e-6)
    for change, told in (
        ({"update/1": torch.ones(4)}, r"'update/1' has the shape \[4\], but \[3\]"),
        ({"update/2": torch.full((3,), float("nan"))}, "NaN or infinity in 3 of its 3"),
        ({"update/3": torch.ones(3)}, "has unknown 'update/3'; expected 3 tensors"),
    ):
        with pytest.raises(UploadError, match=told):
            check_upload(Payload({**whole, **change}), expected)
    with pytest.raises(UploadError, match="lacks 'routing'"):
        check_upload(Payload({"update/1": torch.ones(3)}), expected)
    with pytest.raises(UploadError, match=r"norm is 2\.82843"):
        check_upload(Payload(whole), expected, norm_limit=2.5)


ASKED = {(4, 0), (5, 0), (5, 2)}
"""Client 0 may still answer two rounds, client 2 one."""


@pytest.mark.parametrize(
    ("envelope", "reason"),
    [
        (Envelope("cd34", 5, 0, 9), "the upload is of the run 'cd34', but this is the run 'ab12'."),
        (Envelope("ab12", 5, 1, 9), "an upload arrived, but this client was not asked for one."),
        (Envelope("ab12", 3, 0, 9), "the upload is of round 3, but round 4, 5 was asked for."),
        (Envelope("ab12", 4, 2, 9), "the upload is of round 4, but round 5 was asked for."),
        (
            Envelope("ab12", 5, 2, 101),
            "the upload has 101 bytes, beyond the limit of 100 (federation.upload_limit_bytes).",
        ),
    ],
)
def test_an_envelope_that_answers_nothing_is_refused_with_a_reason(envelope: Envelope, reason: str) -> None:
    with pytest.raises(UploadError) as caught:
        check_envelope(envelope, run="ab12", asked=ASKED, limit_bytes=100)
    assert caught.value.message == reason


@pytest.mark.parametrize("name", ["adapter/a", "own/b"])
def test_the_limit_on_values_holds_for_every_part_and_for_scalars(name: str) -> None:
    def check(value: float, scalar: float = 1.0) -> None:
        payload = Payload({name: torch.tensor([0.0, -value])}, {"s": scalar, "count": 10**9})
        check_upload(payload, Schema({name: Entry((2,))}), largest_value=1e6)

    check(1e6)
    with pytest.raises(UploadError, match=rf"'{name}' has a value of 1\.1e\+06, beyond 1e\+06"):
        check(1.1e6)
    with pytest.raises(UploadError, match=r"the scalar 's' is beyond 1e\+06"):
        check(1.0, scalar=-1e7)


BOUNDS = {"shares/a": Bound(total=2.0), "own/a": Bound(largest=5.0), "own/large": Bound(largest=1e9)}


@pytest.mark.parametrize(
    ("name", "values", "fault"),
    [
        ("shares/a", [1.0, 1.0, 0.0], ""),
        ("shares/a", [1.0, 1.0, 1e-4], ""),
        ("shares/a", [1.0, 1.0, 1e-3], "the shares of 'shares/a' sum to 2.001, beyond 2"),
        ("shares/a", [3.0, -1.0, 0.0], "'shares/a' has a share of -1, which is negative"),
        ("own/a", [-5.0, 0.0, 5.0], ""),
        ("own/a", [0.0, 0.0, -5.1], "'own/a' has a value of 5.1, beyond 5"),
        ("own/large", [0.0, 0.0, 1e8], ""),
        ("other/a", [0.0, 0.0, 1e8], "'other/a' has a value of 1e+08, beyond 1e+06"),
    ],
)
def test_a_bound_of_a_tensor_or_of_its_part_takes_the_limits_place(name: str, values: list[float], fault: str) -> None:
    def check() -> None:
        payload, expected = Payload({name: torch.tensor(values)}), Schema({name: Entry((3,), BOUNDS.get(name))})
        check_upload(payload, expected, largest_value=1e6)

    if not fault:
        check()
        return
    with pytest.raises(UploadError) as caught:
        check()
    assert fault in caught.value.message
