"""Whether every algorithm computes what it is documented to compute, checked without files: ``burnish conformance``.

====================  ==========================================================================================
`suite`, `own`        which algorithms and checks there are, and running them; algorithms of a user's own
`references`          every algorithm as a naive loop in float64, written from docs/algorithms.md
`batches`             random batches with everything that estimators and losses read
`estimators`          advantage estimators: checks, hand answers, what hyper-parameters do
`losses`              policy losses, KL forms, the value loss, modes of aggregation: likewise
`correction`          importance weights and rejection of the rollout: likewise
`comparison`          what a check says when something is wrong
====================  ==========================================================================================

To learn an algorithm, read its naive loop and its hand answer. A check is a function that takes an algorithm and raises a
`comparison.Violation` that says in a sentence what is wrong. The tests run the same checks on the same tables.
"""
