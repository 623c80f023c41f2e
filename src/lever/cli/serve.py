"""`lever serve`: the model over HTTP, as OpenAI's clients know it. Words in, a server out."""

from __future__ import annotations

import math
import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lever.cli import options as o
from lever.cli.console import bar, note
from lever.cli.run import DEFAULT_MODEL
from lever.errors import StorageError, UsageError
from lever.settings import AUTO, CPU

if TYPE_CHECKING:
    from lever.server.worker import State

SERVER = "Server"
HOST, PORT = "127.0.0.1", 8080


def serve(
    model: o.ModelArgument = DEFAULT_MODEL,
    host: Annotated[
        str, o.flag(SERVER, "--host", value="HOST", help="Address to listen on; 0.0.0.0 is all of them.")
    ] = HOST,
    port: Annotated[
        int, o.flag(SERVER, "--port", value="N", help="Port to listen on. 0: any that is free.", min=0, max=65535)
    ] = PORT,
    api_key: Annotated[
        list[str] | None,
        o.flag(SERVER, "--api-key", value="KEY", help="Take requests with this key only. May be given often."),
    ] = None,
    api_key_file: Annotated[
        Path | None, o.flag(SERVER, "--api-key-file", value="FILE", help="Keys to take, one a line.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        o.flag(SERVER, "--allowed-host", value="NAME", help="A name of this machine, besides localhost and HOST."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        o.flag(
            SERVER, "--cors-origin", value="ORIGIN", help="Pages that may ask, such as https://example.org; * is any."
        ),
    ] = None,
    alias: Annotated[
        str | None, o.flag(SERVER, "--alias", value="NAME", help="What the model is called in requests and replies.")
    ] = None,
    queue: Annotated[
        int, o.flag(SERVER, "--queue", value="N", help="Requests that may wait while one is answered.", min=0)
    ] = 8,
    metrics: Annotated[
        bool, o.flag(SERVER, "--metrics", value=o.SWITCH, help="Show figures for Prometheus at /metrics.")
    ] = False,
    sse_ping_interval: Annotated[
        float,
        o.flag(
            SERVER,
            "--sse-ping-interval",
            value="SECONDS",
            help="A stream says at least this often that it lives.",
            min=0.01,
        ),
    ] = 15.0,
    timeout: Annotated[
        float,
        o.flag(
            SERVER,
            "--timeout",
            value="SECONDS",
            help="How long a client may take to send or to take something.",
            min=0.01,
        ),
    ] = 600.0,
    no_grammars: Annotated[
        bool,
        o.flag(
            SERVER,
            "--no-grammars",
            value=o.SWITCH,
            help="Keep no memory for answers that obey a JSON schema (extra grammar), some 50 MB.",
        ),
    ] = False,
    dram: o.Dram = "auto",
    pin: o.Pin = None,
    ctx_size: o.CtxSize = None,
    batch_size: o.BatchSize = o.BATCH_SIZE,
    threads: o.ThreadCount = None,
    ring: o.Ring = o.RING,
    layout: o.LayoutFlag = o.Layout.auto,
    no_image: o.NoImage = False,
    no_profile: o.NoProfile = False,
    draft: o.Draft = AUTO,
    no_draft: o.NoDraft = False,
    preset: o.PresetFlag = None,
    tree_attention: o.TreeAttentionFlag = o.TreeAttention.exact,
    device: o.Device = CPU,
    draft_device: o.DraftDevice = CPU,
    predictor: o.PredictorFlag = AUTO,
    prune: o.PruneFlag = o.Prune.auto,
    offline: o.Offline = False,
    quiet: o.Quiet = False,
    _verbose: o.Verbose = False,
) -> None:
    """Serve a model over HTTP: OpenAI's API at /v1, part of Ollama's at /api, and a page to chat with it.

    lever serve demo
    lever serve model.gguf --dram 2G --port 8000 --api-key secret
    lever serve hf:owner/repo:Q4_K_M --host 0.0.0.0 --api-key-file keys.txt

    One request is answered at a time, the others wait. Ctrl-C ends it, twice at once.
    """
    try:
        from lever.server.about import names_of
        from lever.server.app import Gates, make_app
        from lever.server.guard import allowed_hosts, is_loopback
        from lever.server.listen import listen, url_of
        from lever.server.listen import serve as serve_app
        from lever.server.service import Service
        from lever.server.worker import Served, Worker
    except ModuleNotFoundError as error:
        raise UsageError(f"lever serve needs {error.name}: pip install 'lever-llm[serve]'") from error
    from lever.grammar import is_installed
    from lever.opening import open_ready

    for flag, seconds in (("--sse-ping-interval", sse_ping_interval), ("--timeout", timeout)):
        if not math.isfinite(seconds):
            raise UsageError(f"{flag} is {seconds}: it must be a number of seconds")
    keys = (*(api_key or []), *_keys_of(api_key_file))
    if "" in keys:
        raise UsageError("an API key is empty: leave it out")
    settings = o.model_settings(
        dram,
        threads,
        ring,
        pin=pin,
        ctx_size=ctx_size,
        batch_size=batch_size,
        tree_attention=tree_attention,
        layout=layout,
        device=device,
        draft_device=draft_device,
        grammars=is_installed() and not no_grammars,
    )
    wanted = o.wanted(
        model,
        draft,
        no_draft=no_draft,
        no_image=no_image,
        offline=offline,
        preset=preset,
        layout=layout,
        predictor=predictor,
        prune=prune,
    )
    listening = listen(host, port)
    url, names = url_of(listening), names_of(model, alias)
    gates = Gates(hosts=allowed_hosts(host, allowed_host or []), origins=tuple(cors_origin or []), keys=keys)
    if not (keys or is_loopback(host)):
        note(f"anybody who reaches {host} may use the model: give a key with --api-key")
    with bar(quiet=quiet) as progress:

        def say(state: State) -> None:
            progress.finish()
            if state == "ready" and not quiet:
                note(f"ready: {names[0]} answers at {url}")

        worker = Worker(
            lambda told: Served(*open_ready(wanted, settings, told, use_profile=not no_profile)),
            progress,
            n_waiting=queue,
            on_change=say,
        )
        with closing(Service(worker, names, sse_ping_interval, timeout)) as service:
            ended_by = serve_app(
                make_app(service, gates, with_metrics=metrics),
                worker,
                listening,
                lambda: None if quiet else note(f"listening at {url}, loading {names[0]}"),
                timeout_s=timeout,
            )
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt


def _keys_of(file: Path | None) -> list[str]:
    """Lines of a file; empty ones, and those that begin with #, are none."""
    if file is None:
        return []
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read keys from {file}: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{file} has no key: write one on a line of its own")
    return keys
