"""llama.cpp (package xllamacpp) as a server, in a process of its own: `lever.peer` starts it. Uses nothing of lever.

    python -m lever.llama_cpp MODEL -c CTX -t THREADS [--mmap] [--draft FILE]

Prints its address when the model is loaded, and ends when stdin does.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

DRAFTED = 8  # tokens that its draft guesses at once


def main() -> None:
    """Load, serve, wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-c", type=int, required=True)
    parser.add_argument("-t", type=int, required=True)
    parser.add_argument("--mmap", action="store_true", help="map the files; otherwise read them into memory, repacked")
    parser.add_argument("--draft")
    args = parser.parse_args()
    server = _serve(args)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _serve(args: argparse.Namespace) -> Any:
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path = args.model
    params.n_ctx, params.n_parallel = args.c, 1
    modes = xllamacpp.llama_load_mode
    params.load_mode = modes.LLAMA_LOAD_MODE_MMAP if args.mmap else modes.LLAMA_LOAD_MODE_NONE
    params.no_extra_bufts = args.mmap  # repacking would copy the mapped weights into memory
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.t
    params.warmup, params.fit_params, params.verbosity = False, False, -1
    if args.draft:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max = args.draft, DRAFTED
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = args.t
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
