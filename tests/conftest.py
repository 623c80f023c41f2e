"""For all tests."""

import os

# NumPy is the slow twin of small products here; its threads only spin beside ggml's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
