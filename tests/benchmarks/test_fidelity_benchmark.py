"""The benchmark of fidelity finds what it looks for: a sampler that is not the model's, a gradient that is not the loss's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity import __main__ as fidelity
from benchmarks.fidelity import gradients, sampling
from benchmarks.fidelity.sampling import Questions
from benchmarks.learning.__main__ import TASKS

ROOT = Path(__file__).resolve().parents[2]
TINY = TASKS["tiny"]


@pytest.fixture(scope="module")
def questions() -> Questions:
    return Questions.read(TINY["model"], Path(TINY["train"]), limit=32, samples=32, max_tokens=8, reward=TINY["reward"])


@pytest.fixture(scope="module")
def exact():
    return sampling.exact_model(TINY["model"], "cpu")


@pytest.fixture(scope="module")
def drawn(questions):
    return sampling.native(TINY["model"], "float32", "cpu")(questions)


def test_own_samples_are_drawn_from_the_model(questions, exact, drawn):
    found = sampling.surprise(exact, questions, drawn, every=1)
    assert abs(found["surprise"]) < 4 * found["surprise_error"]
    assert found["read_tokens"] == sum(map(len, drawn))


@pytest.mark.parametrize(("temperature", "sign"), [(0.7, -1), (1.6, 1)])
def test_a_sampler_that_is_too_cold_or_too_hot_is_found(questions, exact, temperature, sign):
    responses = sampling.native(TINY["model"], "float32", "cpu", temperature=temperature)(questions)
    found = sampling.surprise(exact, questions, responses, every=1)
    assert sign * found["surprise"] > 4 * found["surprise_error"]


def test_what_is_read_are_the_models_log_probs_and_entropies(questions, exact, drawn):
    prompts = [questions.prompts[place // questions.samples] for place in (0, 40, 999)]
    responses = [drawn[place] for place in (0, 40, 999)]
    log_probs, entropy, mask = sampling.read(exact, prompts, responses)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        logits = exact(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        alone = logits[torch.arange(len(response)), torch.tensor(response)]
        assert mask[row].tolist() == [place < len(response) for place in range(mask.shape[1])]
        torch.testing.assert_close(log_probs[row, : len(response)], alone, rtol=0, atol=1e-4)
        torch.testing.assert_close(entropy[row, : len(response)], -(logits.exp() * logits).sum(-1), rtol=0, atol=1e-4)


def test_the_share_of_right_answers_and_its_error():
    asked = Questions(rows=[{}, {}], prompts=[[1], [2]], samples=4, max_tokens=1, ends=[0], reward="x:y")
    scores = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    found = sampling.described(asked, scores, [[5], [5, 0], [5], [5], [5], [5], [5], [5]])
    # Draws of the second prompt never differ; of the first, variance 1/4 each, so 1/3 unbiased, of a mean over four, halved.
    assert found == {
        "right": 0.75,
        "right_error": pytest.approx((0.25 / 3) ** 0.5 / 2),
        "tokens": 9 / 8,
        "responses": 8,
    }


def test_burnishs_gradient_is_autograds_and_another_one_is_not(questions, drawn):
    few = replace(questions, rows=questions.rows[:8], prompts=questions.prompts[:8], samples=8)
    kept = [drawn[prompt * 32 + sample] for prompt in range(8) for sample in range(8)]
    weights = gradients.advantages(few.scores(TINY["model"], kept))
    exact = gradients.plain(TINY["model"], "float32", "cpu")(few, kept, weights)
    own = gradients.ours(TINY["model"], "float32", "cpu")
    found = gradients.compare(own(few, kept, weights), exact)
    assert found["cosine"] == pytest.approx(1, abs=1e-6)
    assert found["length"] == pytest.approx(1, abs=1e-5)
    other = gradients.compare(own(few, kept, weights.roll(1, 0)), exact)
    assert other["cosine"] < 0.9
    reverse = gradients.compare(own(few, kept, -2 * weights), exact)
    assert (reverse["cosine"], reverse["length"]) == (pytest.approx(-1, abs=1e-6), pytest.approx(2, abs=1e-4))


def test_gradients_of_different_parameters_are_refused():
    with pytest.raises(ValueError, match=r"different parameters: \['b'\]"):
        gradients.compare({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})


@pytest.mark.slow
def test_a_run_writes_what_its_tables_show(monkeypatch, capsys, tmp_path):
    out = tmp_path / "fidelity.json"
    words = ["--task", "tiny", "--device", "cpu", "--prompts", "8", "--samples", "8", "--gradient-prompts", "8"]
    monkeypatch.setattr("sys.argv", ["fidelity", *words, "--logs", str(tmp_path), "--out", str(out), "--json"])
    fidelity.main()
    printed = capsys.readouterr().out
    assert fidelity.tables(json.loads(out.read_text())) in printed
    result = json.loads(printed.splitlines()[-1])
    (model,) = result["models"]
    assert set(model["samples"]) == {"native float32", "hf float32"}
    assert model["rows_of"] == "hf float32"
    assert model["gradients"]["sides"]["burnish float32"]["cosine"] == pytest.approx(1, abs=1e-6)


def test_fewer_samples_than_the_gradient_is_of_are_refused(capsys):
    with pytest.raises(SystemExit):
        fidelity.parse(["--task", "tiny", "--samples", "4"])
    assert "gradients are of 8 samples a prompt, and --samples is 4" in capsys.readouterr().err


def test_what_is_not_there_is_said_before_anything_is_loaded(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(TASKS, "smollm2", TASKS["smollm2"] | {"train": str(tmp_path / "train.jsonl")})
    for words, said in (
        (["--task", "smollm2"], "`python -m examples.reasoning.data` makes the rows"),
        (["--show", str(tmp_path / "none.json")], f"there is no {tmp_path / 'none.json'} to show."),
    ):
        with pytest.raises(SystemExit):
            fidelity.parse(words)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [("smollm2", "smollm2"), ("runs/mine/global_step_20/actor", "after step 20"), ("models/mine", "mine")],
)
def test_models_are_called_by_what_they_are(name, said):
    assert fidelity.label(name) == said


def test_the_page_shows_the_tables_of_what_is_kept():
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    kept = sorted((ROOT / "docs" / "results").glob("fidelity-*.json"))
    assert kept
    for path in kept:
        assert fidelity.tables(json.loads(path.read_text())) in page, f"--show {path.name} prints what belongs there"
