"""llama.cpp (package xllamacpp) on one prompt, by mmap, without a draft; prints one line of JSON.

    python -m benchmarks.llama_cpp MODEL [-n TOKENS] [-c CTX] [--no-mmap]

To be run by `benchmarks.cage` in a process of its own, so that a memory cage holds it alone.
"""

from __future__ import annotations

import argparse
import json
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import xllamacpp


def main() -> None:
    """Load, complete, print the server's own timings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-p", "--prompt", default="Explain how a steam engine works.")
    parser.add_argument("-n", type=int, default=24)
    parser.add_argument("-c", type=int, default=1024)
    parser.add_argument("--no-mmap", action="store_true")
    args = parser.parse_args()
    params: Any = xllamacpp.CommonParams()
    params.model.path = args.model
    params.n_ctx, params.n_parallel = args.c, 1
    modes = xllamacpp.llama_load_mode
    params.load_mode = modes.LLAMA_LOAD_MODE_NONE if args.no_mmap else modes.LLAMA_LOAD_MODE_MMAP
    params.no_extra_bufts = not args.no_mmap  # repacking would copy the mapped weights into memory
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.warmup, params.fit_params, params.verbosity = False, False, -1
    server: Any = xllamacpp.Server(params)
    connection = HTTPConnection(urlsplit(server.listening_address).netloc, timeout=600)
    request = {"prompt": args.prompt, "n_predict": args.n, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
    timings = json.load(connection.getresponse())["timings"]
    print(json.dumps({"tokens_per_s": timings["predicted_per_second"], "prefill_s": timings["prompt_ms"] / 1e3}))


if __name__ == "__main__":
    main()
