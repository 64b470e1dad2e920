import torch

from benchmarks import kernels


def test_the_twins_are_timed_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "REPEATS", 1)
    report = kernels.on_cpu(8)
    names = {result["kernel"] for result in report["kernels"]}
    assert {"silu_mul", "decode_attention, contiguous", "decode_attention, gathered"} <= names
    assert all(result["us"] > 0 and result["gb_per_s"] > 0 for result in report["kernels"])
    kernels.show({"machine": "this one", **report})
    assert "decode_attention, gathered" in capsys.readouterr().out


def test_every_call_equals_its_twin():
    for name, kernel in kernels.simple_calls(kernels.SMOLLM_135M, 4, torch.bfloat16, "cpu").items():
        if kernel["twin"] is not None:
            assert kernels.furthest(kernel["call"](), kernel["twin"]()) == 0, name


def test_the_kernels_of_training_are_timed_in_both_directions(monkeypatch):
    monkeypatch.setattr(kernels, "REPEATS", 1)
    results = kernels.time_training(on_device=False)["kernels"]
    names = {result["kernel"] for result in results}
    assert {f"{name}_backward" for name in ("rms_norm", "silu_mul", "rotate")} <= names
    assert all(result["us"] > 0 and result["gb_per_s"] > 0 for result in results)
    assert {result["dtype"] for result in results} == {"float32", "bfloat16"}
