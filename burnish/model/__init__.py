"""One Hugging Face causal LM: loading it with our attention, packing rows for it, and what its head gives each token."""
