"""The operations in Triton; imported with the first CUDA tensor."""
