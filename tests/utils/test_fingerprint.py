"""A fingerprint depends on every bit and its place, and on nothing else."""

import pytest
import torch

from burnish.utils import fingerprint as module
from burnish.utils.fingerprint import Fingerprints, combined, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def random(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.uint8).view(dtype) if dtype != torch.bool else bits % 2 == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 1000, 1003])
def test_it_is_the_sum_of_the_definition(dtype: torch.dtype, numel: int) -> None:
    tensor = random(numel, dtype)
    raw = tensor.view(torch.uint8).numpy().tobytes() if numel else b""
    raw += b"\0" * (-len(raw) % 4)
    words = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
    expected = sum((2 * i + 1) * word for i, word in enumerate(words)) * 0x1E3779B97F4A7C15
    assert int(fingerprint(tensor)) % 2**64 == expected % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_and_every_place_counts(dtype: torch.dtype) -> None:
    tensor = random(64, dtype)
    usual = int(fingerprint(tensor))
    for byte in range(tensor.nbytes):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(torch.uint8)[byte] ^= 1 << bit
            assert int(fingerprint(changed)) != usual
    for i in range(0, 64, 5):
        swapped = tensor.clone()
        swapped[[i, 63 - i]] = tensor[[63 - i, i]]
        assert int(fingerprint(swapped)) != usual
    # The sign of zero and the kind of NaN are bits as well.
    zero = torch.zeros(2, dtype=dtype)
    assert int(fingerprint(zero)) != int(fingerprint(-zero))
    assert int(fingerprint(torch.full((3,), float("nan"), dtype=dtype))) == int(
        fingerprint(torch.full((3,), float("nan"), dtype=dtype))
    )


def test_how_it_is_cut_and_where_it_lies_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random(4 * 999, torch.bfloat16)[1:]
    usual = int(fingerprint(tensor))
    assert int(fingerprint(tensor.clone())) == usual
    assert int(fingerprint(tensor[: 17 * 235].view(17, 235).T.contiguous().T)) == int(fingerprint(tensor[: 17 * 235]))
    for words in (1, 7, 100):
        monkeypatch.setattr(module, "_WORDS", {"cpu": words})
        assert int(fingerprint(tensor)) == usual


def test_together_they_depend_on_names_and_values_alone() -> None:
    held = Fingerprints()
    held.add("a", torch.ones(3))
    held.add("b", torch.zeros(3))
    values = held.read()
    assert values == {"a": int(fingerprint(torch.ones(3))), "b": 0}
    assert combined(values) == combined(dict(reversed(values.items())))
    assert combined(values) != combined({"a": values["b"], "b": values["a"]})
    assert combined(values) != combined({"a": values["a"]})
    assert Fingerprints().read() == {}
