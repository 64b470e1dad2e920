"""Which responses a page has, what is known of their tokens, and how they fit."""

import json
import random

import numpy as np
import pyarrow.parquet as pq
import pytest

from burnish.report.choose import choose, index_of, pack, pick
from burnish.report.rollouts import Dumps, Row, constant_groups, histograms
from burnish.report.tokens import SCALE, Pieces, page_tokens
from tests.report.made_runs import TINY, made_run

TOKENIZER = TINY / "model" / "tokenizer.json"


def row(prompt, sample=0, score=1.0, tokens=10, cost=100, offset=0):
    return Row(prompt, f"u{prompt}", sample, score, tokens, "s", "stop", True, True, cost, 0, offset, cost)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return made_run(tmp_path_factory.mktemp("made") / "run", num_steps=9)


def test_the_index_knows_every_row_without_its_text(run):
    dumps = Dumps(run / "rollouts")
    assert dumps.refresh()
    assert sorted(dumps.index) == list(range(1, 10))
    lines = [json.loads(line) for line in (run / "rollouts" / "3.jsonl").read_text().splitlines()]
    assert [entry.score for entry in dumps.index[3]] == [line["score"] for line in lines]
    assert [entry.num_tokens for entry in dumps.index[3]] == [line["num_tokens"] for line in lines]
    assert [entry.sample_index for entry in dumps.index[3]] == [0, 1, 2, 3] * 4
    assert not dumps.refresh()


def test_new_changed_and_removed_files_are_noticed(tmp_path):
    dumps = Dumps(tmp_path / "rollouts")
    assert not dumps.refresh()
    (tmp_path / "rollouts").mkdir()
    file = tmp_path / "rollouts" / "1.jsonl"
    file.write_text('{"uid": "a", "prompt": "p", "response": "r", "score": 1}\n')
    (tmp_path / "rollouts" / "1.jsonl.tmp").write_text("{")
    assert dumps.refresh()
    file.write_text(file.read_text() * 3)
    assert dumps.refresh()
    # Dumps without it number the samples of a prompt in their order.
    assert [entry.sample_index for entry in dumps.index[1]] == [0, 1, 2]
    file.unlink()
    assert dumps.refresh()
    assert dumps.index == {}


def test_a_whole_row_has_its_texts_and_the_numbers_of_its_tokens(run):
    dumps = Dumps(run / "rollouts")
    dumps.refresh()
    rows = dumps.index[2][4:7]
    found = dumps.whole(2, rows, Pieces(TOKENIZER))
    line = json.loads((run / "rollouts" / "2.jsonl").read_text().splitlines()[4])
    assert found["prompts"][str(rows[0].prompt_id)] == line["prompt"]
    entry = found["rows"][0]
    assert "".join(entry["tokens"]["text"]) == line["response"]
    assert "response" not in entry
    assert entry["extras"]["acc"] == line["acc"]
    table = pq.read_table(run / "rollouts" / "2.tokens.parquet").to_pylist()[4]
    assert entry["tokens"]["rollout_log_probs"] == pytest.approx(np.array(table["rollout_log_probs"]) * SCALE, abs=0.51)
    assert entry["tokens"]["advantages"] == pytest.approx(table["advantages"][0] * SCALE)
    assert entry["tokens"]["loss_mask"] == "0" + "1" * (len(table["response_ids"]) - 1)
    assert entry["tokens"]["response_mask"] == 1
    assert "values" not in entry["tokens"]


def test_without_a_tokenizer_tokens_are_ids_and_the_response_stays(run):
    dumps = Dumps(run / "rollouts")
    dumps.refresh()
    entry = dumps.whole(1, dumps.index[1][:1], None)["rows"][0]
    assert entry["response"].endswith("<|end|>")
    assert len(entry["tokens"]["ids"]) == dumps.index[1][0].num_tokens


def test_pieces_are_the_decoded_text_with_characters_at_their_last_token():
    pieces = Pieces(TOKENIZER)
    text = "a é 日本 🙂\n<|end|>x"
    ids = pieces._tokenizer.encode(text).ids
    split = pieces.split(ids)
    assert len(split) == len(ids)
    assert "".join(split) == text
    smile = text.encode().index("🙂".encode())
    assert split[smile : smile + 4] == ["", "", "", "🙂"]
    # Half a character at the end is shown as one that is broken, and ids that no token has by themselves.
    assert pieces.split(ids[: smile + 2])[-1] == "\ufffd"
    assert pieces.split([99_999]) == ["⟨99999⟩"]


def test_pieces_of_a_sentencepiece_tokenizer(tmp_path):
    vocabulary = {"▁the": 0, "▁c": 1, "at": 2, "<0xC3>": 3, "<0xA9>": 4, "</s>": 5}
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    added = {
        "id": 5,
        "content": "</s>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True, "unk_token": None}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [added], "decoder": decoder, "model": model}))
    assert Pieces(file).split([0, 1, 2, 3, 4, 5]) == [" the", " c", "at", "", "é", "</s>"]


def test_numbers_that_are_not_finite_are_none_and_what_is_missing_is_left_out():
    row = {
        "response_ids": np.array([1, 2]),
        "rollout_log_probs": np.array([np.nan, -0.5], np.float32),
        "advantages": np.array([1e30, 0.0], np.float32),
        "values": None,
        "loss_mask": None,
        "response_mask": np.array([True, False]),
    }
    assert page_tokens(row, None) == {
        "ids": [1, 2],
        "rollout_log_probs": [None, -500],
        "advantages": [10**7, 0],
        "response_mask": "10",
    }


def test_a_damaged_or_foreign_token_file_costs_the_tokens_only(tmp_path):
    folder = made_run(tmp_path / "run", num_steps=2) / "rollouts"
    (folder / "2.tokens.parquet").write_bytes((folder / "1.tokens.parquet").read_bytes())
    (folder / "1.tokens.parquet").write_text("no parquet")
    dumps = Dumps(folder)
    dumps.refresh()
    for step in (1, 2):
        assert "tokens" not in dumps.whole(step, dumps.index[step][:1], None)["rows"][0]
    assert "1.tokens.parquet cannot be read" in dumps.problems[0]


def test_all_rows_are_taken_where_they_fit_and_whole_groups_where_not():
    rows = [row(prompt, sample, offset=10 * prompt + sample) for prompt in range(6) for sample in range(4)]
    assert pick(rows, float("inf"), 100) == rows
    taken = pick(rows, float("inf"), 9)
    assert [entry.prompt_id for entry in taken] == [0] * 4 + [1] * 4 + [2]
    # The best, the worst and the longest of a group say most about it.
    scored = [(0.5, 1), (0.4, 1), (0, 1), (0.4, 9), (1, 1), (0.1, 1)]
    group = [row(7, sample, score, cost=cost) for sample, (score, cost) in enumerate(scored)]
    assert sorted(entry.sample_index for entry in pick(group, 0, 3)) == [0, 2, 3, 4]


def test_a_sample_keeps_the_same_prompts_at_every_step():
    generator = random.Random(0)
    steps = []
    for _ in range(3):
        rows = [row(prompt, sample) for prompt in range(40) for sample in range(4)]
        generator.shuffle(rows)
        steps.append({entry.prompt_id for entry in pick(rows, float("inf"), 20)})
    assert steps[0] == steps[1] == steps[2]
    assert len(steps[0]) == 5


def test_the_budget_holds_the_newest_steps_have_most_and_none_is_left_out(run):
    dumps = Dumps(run / "rollouts")
    dumps.refresh()
    pieces = Pieces(TOKENIZER)
    everything = choose(dumps, pieces, 10**9)
    assert everything.rows == dumps.index
    budget = everything.size // 2
    half = choose(dumps, pieces, budget)
    assert half.size <= budget
    assert half.size > 0.5 * budget
    sizes = [len(half.rows[step]) for step in sorted(half.rows)]
    assert len(sizes) == 9
    assert sizes[-1] > 2 * sizes[0] >= 2
    assert choose(dumps, pieces, 100).rows == {}


def test_packing_is_the_same_for_the_same_rows():
    assert pack({"a": [1, None, "</script>"]}) == pack({"a": [1, None, "</script>"]})
    assert "<" not in pack({"a": "</script>"})


def test_the_index_of_the_page_names_sources_and_ends_once():
    rows = {1: [row(1), row(2)], 2: [row(1, score=None, tokens=None)]}
    found = index_of({1: rows[1][:1], 2: rows[2]}, rows)
    assert (found["sources"], found["finishes"]) == (["s"], ["stop"])
    assert found["steps"][0] == {"step": 1, "total": 2, "rows": [[1, 1.0, 10, 0, 0, 0, 1]]}
    assert found["steps"][1]["rows"] == [[1, None, None, 0, 0, 0, 1]]


def test_histograms_count_every_row_once_also_of_long_runs_and_equal_values():
    index = {step: [row(1, sample, score=float(sample % 2), tokens=5) for sample in range(4)] for step in range(500)}
    found = histograms(index)
    assert len(found["steps"]) <= 120
    assert sum(map(sum, found["score"]["counts"])) == sum(found["rows"]) == 2000
    assert (found["score"]["low"], found["score"]["high"]) == (0.0, 1.0)
    assert (found["length"]["low"], found["length"]["high"]) == (4.5, 5.5)
    assert "score" not in histograms({1: [row(1, score=None)]})
    # Sums of the same parts in another order; and numbers whose distance is none.
    nearly = histograms({1: [row(1, score=0.3), row(1, score=0.1 + 0.2)]})["score"]
    assert sum(map(sum, nearly["counts"])) == 2
    assert "score" not in histograms({1: [row(1, score=1e308), row(1, score=-1e308)]})


def test_groups_whose_scores_are_equal_are_counted():
    varied = [row(1, sample, float(sample)) for sample in range(3)]
    equal = [row(2, sample, 1.0) for sample in range(3)]
    assert list(constant_groups({4: [*varied, *equal, row(3)]})) == [(4, 1, 2)]
    # What dynamic sampling has left out already is no loss.
    for entry in equal:
        entry.trained = False
    assert list(constant_groups({4: [*varied, *equal]})) == [(4, 0, 1)]
