"""Score functions for kinds of answers, one file each; `burnish.reward.compute_score` says which data source uses which."""
