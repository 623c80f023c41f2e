"""Weights on their way from flash to the kernels: what is read (plan), how (reader), and when (store)."""
