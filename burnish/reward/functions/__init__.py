"""Score functions, a file for each kind of answer; `burnish.reward.compute_score` says which data source uses which."""
