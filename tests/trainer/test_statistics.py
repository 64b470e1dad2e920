"""Statistics over several responses to each prompt, against drawing them one by one and against tables."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from burnish.trainer import statistics, votes
from burnish.trainer.intervals import student_quantile


def draws(n: int, k: int, replace: bool):
    """All ordered draws of k of n responses; each is as likely."""
    return itertools.product(range(n), repeat=k) if replace else itertools.permutations(range(n), k)


def vote(values: np.ndarray, answers: list[str | None], chosen: tuple[int, ...]) -> float:
    """The value of the first drawn response with the answer that most give, of equals the first drawn."""
    counts = Counter(answers[i] for i in chosen if answers[i] is not None)
    if not counts:
        return 0.0
    winner = next(answers[i] for i in chosen if counts.get(answers[i]) == max(counts.values()))
    return next(float(values[i]) for i in chosen if answers[i] == winner)


@pytest.mark.parametrize("replace", [True, False])
def test_best_worst_and_majority_are_the_expectations_over_all_draws(replace: bool) -> None:
    generator = np.random.default_rng(0)
    for _ in range(25):
        n = int(generator.integers(1, 6))
        values = generator.normal(size=n)
        answers = [[None, "a", "b", "c"][i] for i in generator.integers(0, 4, n)]
        for k in range(1, min(n, 4) + 1):
            chosen = list(draws(n, k, replace))
            found = {
                "best": statistics.best_at_k([values], k, replace=replace),
                "worst": statistics.worst_at_k([values], k, replace=replace),
                "maj": statistics.maj_at_k([values], [answers], k, replace=replace),
            }
            of_draws = {
                "best": [max(values[i] for i in draw) for draw in chosen],
                "worst": [min(values[i] for i in draw) for draw in chosen],
                "maj": [vote(values, answers, draw) for draw in chosen],
            }
            for name, drawn in found.items():
                assert drawn.mean[0] == pytest.approx(np.mean(of_draws[name]), abs=1e-9), (name, values, answers, k)
                assert drawn.std[0] == pytest.approx(np.std(of_draws[name]), abs=1e-6), (name, values, answers, k)


def test_votes_that_are_drawn_are_near_those_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = (1, 2, 2, 5)
    exact = {replace: votes.win_chances(counts, 1, 6, replace) for replace in (True, False)}
    votes.win_chances.cache_clear()
    monkeypatch.setattr(votes, "_EXACT_VOTE_COST", 0)
    for replace, chances in exact.items():
        drawn = votes.win_chances(counts, 1, 6, replace)
        assert not np.array_equal(drawn, chances)
        np.testing.assert_allclose(drawn, chances, atol=0.05)
    votes.win_chances.cache_clear()


def test_the_chances_of_all_answers_sum_to_one_where_everyone_votes() -> None:
    for counts in ((1,), (1, 1, 1, 1), (2, 3, 3), (1, 2, 4, 9)):
        for k in {1, min(2, sum(counts)), sum(counts)}:
            for replace in (True, False):
                assert votes.win_chances(counts, 0, k, replace).sum() == pytest.approx(1.0)


def test_pass_at_k_is_the_chance_of_a_right_one() -> None:
    assert statistics.pass_at_k([[1, 0, 0, 0]], 1)[0] == 0.25
    assert statistics.pass_at_k([[1, 0, 0, 0]], 2)[0] == 0.5
    assert statistics.pass_at_k([[True, True, True, False]], 2)[0] == 1.0
    assert statistics.pass_at_k([[0] * 4], 4)[0] == 0.0
    # n = 100 with 7 right: 1 - C(93, 10) / C(100, 10), where a product of floats would do, too.
    right = np.arange(100) < 7
    assert statistics.pass_at_k([right], 10)[0] == pytest.approx(1 - math.comb(93, 10) / math.comb(100, 10), abs=1e-12)


def test_prompts_with_different_numbers_of_responses_keep_their_places() -> None:
    rows = [[1.0, 0.0], [5.0], [3.0, 1.0, 2.0], [0.0, 0.0]]
    assert statistics.mean_at_n(rows).tolist() == [0.5, 5.0, 2.0, 0.0]
    assert statistics.best_at_k(rows, 1, replace=False).mean.tolist() == [0.5, 5.0, 2.0, 0.0]
    assert statistics.worst_at_k(rows, 9, replace=True).mean[1] == 5.0
    square = np.array([[1.0, 2.0], [3.0, 5.0]])
    assert statistics.best_at_k(square, 2, replace=False).mean.tolist() == [2.0, 5.0]
    assert statistics.std_at_n(square).tolist() == [0.5, 1.0]


def test_more_responses_than_there_are_cannot_be_drawn_without_replacement() -> None:
    with pytest.raises(ValueError, match="k=3"):
        statistics.best_at_k([[1.0, 2.0]], 3, replace=False)
    with pytest.raises(ValueError, match="k=3"):
        statistics.maj_at_k([[1.0, 2.0]], [["a", "b"]], 3, replace=False)
    with pytest.raises(ValueError, match="without responses"):
        statistics.mean_at_n([[1.0], []])


def test_ks_are_powers_of_two_and_all() -> None:
    assert [statistics.ks(n) for n in (1, 2, 3, 8, 12)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]


def test_rows_of_a_prompt_are_found_wherever_they_are() -> None:
    assert [rows.tolist() for rows in statistics.group_rows(["b", "a", "b", "a", "c"])] == [[0, 2], [1, 3], [4]]


def test_one_response_a_prompt_has_wilsons_interval() -> None:
    # 8 of 10: the textbook's 49.0 % to 94.3 %.
    found = statistics.interval(np.array([1.0] * 8 + [0.0] * 2), num_responses=10)
    assert (found.low, found.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    # All right says something, and not everything: 10 of 10 are 72.2 % to 100 %.
    sure = statistics.interval(np.ones(10), num_responses=10)
    assert (sure.low, sure.high) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    # Four right responses to each prompt are no more prompts.
    assert statistics.interval(np.ones(10), num_responses=40) == sure


def test_scores_of_any_scale_have_students_interval() -> None:
    for degrees, quantile in ((1, 12.7062), (2, 4.30265), (5, 2.57058), (30, 2.04227), (2000, 1.95996)):
        assert student_quantile(0.975, degrees) == pytest.approx(quantile, rel=1e-4)
    found = statistics.interval(np.array([1.0, 2.0, 3.0, 4.0]))
    assert (found.low, found.high) == (pytest.approx(0.4457, abs=1e-4), pytest.approx(4.5543, abs=1e-4))
    assert statistics.interval(np.array([1.0])).low is None
    assert statistics.interval(np.array([])).high is None


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    # Prompts of many difficulties, four responses to each: as single responses they would be too narrow.
    generator = np.random.default_rng(1)
    hits = {"clustered": 0, "as if independent": 0}
    num_trials = 400
    for _ in range(num_trials):
        chances = generator.beta(0.3, 0.6, size=60)
        means = generator.binomial(4, chances) / 4
        clustered = statistics.interval(means, num_responses=240)
        p = means.mean()
        narrow = 1.96 * math.sqrt(p * (1 - p) / 240)
        hits["clustered"] += clustered.low <= 1 / 3 <= clustered.high
        hits["as if independent"] += abs(p - 1 / 3) <= narrow
    assert 0.92 <= hits["clustered"] / num_trials <= 0.98
    assert hits["as if independent"] / num_trials < 0.85


@pytest.mark.parametrize("num_prompts", [1, 2, 3, 5])
def test_many_responses_do_not_make_up_for_few_prompts(num_prompts: int) -> None:
    generator = np.random.default_rng(num_prompts)
    hits = 0
    for _ in range(300):
        means = generator.binomial(16, generator.uniform(size=num_prompts)) / 16
        found = statistics.interval(means, num_responses=16 * num_prompts)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0.5 <= found.high
    assert hits / 300 >= 0.9


def test_numbers_that_are_all_the_same_have_no_students_interval() -> None:
    assert statistics.interval(np.ones(5)).low is None
    assert statistics.compare(np.zeros(2), np.ones(2)).interval.high is None


def test_a_difference_of_rounding_beside_a_real_one_is_compared() -> None:
    assert statistics.compare(np.zeros(3), np.array([1.0, -1.0, 3e-10])).p_value > 0.5


def test_one_response_each_is_compared_by_mcnemars_exact_test() -> None:
    first = np.array([1.0] * 50 + [0.0] * 12 + [1.0] * 3 + [0.0] * 5)
    second = np.array([1.0] * 50 + [1.0] * 12 + [0.0] * 3 + [0.0] * 5)
    found = statistics.compare(first, second)
    # 2 P(at most 3 of 15 at one half) = 2 (1 + 15 + 105 + 455) / 2^15.
    assert (found.test, found.p_value) == ("mcnemar", pytest.approx(1152 / 32768))
    assert (found.num_better, found.num_worse, found.num_equal) == (12, 3, 55)
    assert found.mean == pytest.approx(9 / 70)
    assert found.interval.low < found.mean < found.interval.high
    back = statistics.compare(second, first)
    assert (back.p_value, back.mean) == (found.p_value, -found.mean)


@pytest.mark.timeout(20)
def test_the_exact_test_of_many_prompts_takes_little_time() -> None:
    num_better, num_worse = 20_300, 19_700
    second = np.array([1.0] * num_better + [0.0] * num_worse)
    found = statistics.compare(1 - second, second)
    # With a correction for continuity the normal distribution is as good.
    deviations = (num_better - num_worse - 1) / math.sqrt(num_better + num_worse)
    assert found.test == "mcnemar"
    assert found.p_value == pytest.approx(math.erfc(deviations / math.sqrt(2)), rel=0.01)


def test_shares_of_several_responses_are_compared_by_all_flips_of_signs() -> None:
    def of_all_flips(differences: np.ndarray) -> float:
        sums = [abs(sum(signs * differences)) for signs in itertools.product((-1, 1), repeat=len(differences))]
        return float(np.mean(np.array(sums) >= abs(differences.sum()) - 1e-12))

    differences = np.array([0.25, -0.5, 0.75, 0.25, 1.0, 0.0, 0.5])
    found = statistics.compare(np.zeros(7), differences)
    assert (found.test, found.p_value) == ("permutation, exact", pytest.approx(of_all_flips(differences)))
    # Numbers of no common grid: random flips, of the same hypothesis.
    odd = differences + np.array([0, 1, -1, 1, 1, 0, -1]) * math.pi * 1e-4
    drawn = statistics.compare(np.zeros(7), odd)
    assert drawn.test == "permutation"
    assert drawn.p_value == pytest.approx(of_all_flips(odd), abs=0.01)
    assert statistics.compare(np.zeros(7), odd) == drawn


def test_a_model_beside_itself_does_not_differ() -> None:
    same = statistics.compare(np.array([0.3, 0.1, 0.2]), np.array([0.3, 0.1 + 1e-16, 0.2]))
    assert (same.p_value, same.num_equal, same.mean) == (1.0, 3, 0.0)
    with pytest.raises(ValueError, match="same ones"):
        statistics.compare(np.zeros(2), np.zeros(3))
