"""The native engine: scheduler, slot cache, attention contexts, model runner, sampler, and the loop that joins them."""
