"""From losses of tokens to one number, as loops; denominators are counted from the mask that is given."""

from __future__ import annotations

from burnish.conformance.references.loops import Matrix, kept


def aggregate(losses: Matrix, mask: Matrix, mode: str, loss_scale_factor: float) -> float:
    """The loss of the tokens in the mask under a mode of aggregation."""
    rows = [[losses[i][t] for t in kept(mask[i])] for i in range(len(losses)) if any(mask[i])]
    return AGGREGATION_REFERENCES[mode](rows, loss_scale_factor)


def token_mean(rows: Matrix, scale: float) -> float:
    """Mean over the tokens."""
    return sum(sum(row) for row in rows) / sum(len(row) for row in rows)


def seq_mean_token_sum(rows: Matrix, scale: float) -> float:
    """Mean over the rows of their sums."""
    return sum(sum(row) for row in rows) / len(rows)


def seq_mean_token_mean(rows: Matrix, scale: float) -> float:
    """Mean over the rows of their means."""
    return sum(sum(row) / len(row) for row in rows) / len(rows)


def seq_mean_token_sum_norm(rows: Matrix, scale: float) -> float:
    """Mean over the rows of their sums divided by one constant."""
    return sum(sum(row) / scale for row in rows) / len(rows)


def token_sum(rows: Matrix, scale: float) -> float:
    """Sum over the tokens."""
    return sum(sum(row) for row in rows)


AGGREGATION_REFERENCES = {
    "token-mean": token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "token-sum": token_sum,
}
