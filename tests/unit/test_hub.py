"""Models of the Hugging Face hub, fetched by the real huggingface_hub from a small fake hub on loopback."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from lever.errors import DownloadError, UsageError
from lever.models import Removed, hub, list_models, remove, resolve
from lever.models.hub import Reference, choose, parse
from lever.models.images import image_path

HTML = b"<!DOCTYPE html><html><body>Sign in</body></html>"


@dataclass
class Repo:
    """A repository of the fake hub and how badly it behaves."""

    files: dict[str, bytes]
    commit: str = "1" * 40
    status: tuple[int, str] | None = None  # HTTP status and X-Error-Code for every request
    token: str | None = None  # needed to read
    body: bytes | None = None  # sent in place of every file
    listing: bytes | None = None  # sent in place of the list of files
    bare: bool = False  # list names only, no sizes and hashes
    cut_at: int | None = None  # the next whole answer to a GET ends after so many bytes
    ranges: bool = True  # whether Range is obeyed
    hold: threading.Event | None = None  # waited for after the cut, with the connection open
    slow: float = 0.0  # seconds between the four pieces of a body
    drop: bool = False  # close the connection without an answer
    requests: list[str] = field(default_factory=list)

    def sent(self, name: str) -> bytes:
        return self.files[name] if self.body is None else self.body


REPOS: dict[str, Repo] = {}


class Hub(BaseHTTPRequestHandler):
    """The three requests that a download makes: list the files, ask for a file's ETag, get it."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].removeprefix("/")
        words = path.removeprefix("api/models/").split("/")
        repo = REPOS.get("/".join(words[:2]))
        if repo is None:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        repo.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if repo.drop:
            self.close_connection = True
        elif repo.token is not None and self.headers.get("Authorization") != f"Bearer {repo.token}":
            self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif repo.status is not None:
            self.answer(repo.status[0], b"", {"X-Error-Code": repo.status[1]})
        elif path.startswith("api/models/"):
            self.answer(200, listing("/".join(words), repo), {"Content-Type": "application/json"})
        else:
            self.file(repo, "/".join(words[4:]))

    def file(self, repo: Repo, name: str) -> None:
        if name not in repo.files:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
            return
        body = repo.sent(name)
        headers = {"ETag": f'"{hashlib.sha256(repo.files[name]).hexdigest()}"', "X-Repo-Commit": repo.commit}
        wanted = self.headers.get("Range")
        if wanted is not None and repo.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            self.answer(206, body[start:], headers)
        elif self.command == "GET" and repo.cut_at is not None:
            cut, repo.cut_at = repo.cut_at, None
            self.answer(200, body[:cut], headers, length=len(body))
            if repo.hold is not None:
                repo.hold.wait(30)
            self.close_connection = True
        else:
            self.answer(200, body, headers, pause=repo.slow)

    def answer(
        self, status: int, body: bytes, headers: dict[str, str], length: int | None = None, pause: float = 0.0
    ) -> None:
        self.send_response(status)
        for name, value in {
            **headers,
            "Content-Length": str(len(body) if length is None else length),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        step = max(1, len(body) // 4)
        for start in range(0, len(body), step):
            self.wfile.write(body[start : start + step])
            self.wfile.flush()
            time.sleep(pause)

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""


def listing(name: str, repo: Repo) -> bytes:
    if repo.listing is not None:
        return repo.listing
    siblings: list[dict[str, object]] = [{"rfilename": file} for file in repo.files]
    for sibling, content in zip(siblings, repo.files.values(), strict=True):
        if not repo.bare:
            digest = hashlib.sha256(content).hexdigest()
            sibling |= {"size": len(content), "blobId": "b"}
            sibling |= {"lfs": {"size": len(content), "sha256": digest, "pointerSize": 134}}
    return json.dumps({"id": name, "sha": repo.commit, "siblings": siblings}).encode()


def unload() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The fake hub, and huggingface_hub imported anew so that it reads HF_ENDPOINT; gives its HF_HOME."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    home = tmp_path_factory.mktemp("huggingface")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_"))]:
            patch.delenv(name)
        patch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        saved = unload()
        importlib.import_module("huggingface_hub")
        yield home
        unload()
        sys.modules.update(saved)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _fresh(endpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty caches and no repositories."""
    monkeypatch.setenv("LEVER_HOME", str(tmp_path / "lever"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert endpoint.is_dir()
    REPOS.clear()
    yield
    for repo in REPOS.values():
        if repo.hold is not None:
            repo.hold.set()


def gguf(size: int = 200_000) -> bytes:
    return b"GGUF" + os.urandom(size)


def serve(name: str, *files: str, **behaviour: object) -> Repo:
    REPOS[name] = Repo({file: gguf() for file in files}, **behaviour)  # type: ignore[arg-type]
    return REPOS[name]


class Recorder:
    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.done = self.finished = 0

    def start(self, total: int, what: str) -> None:
        self.jobs.append(f"{what}: {total}")

    def advance(self, n: int) -> None:
        self.done += n

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("hf:a/b", Reference("a/b")),
        ("hf:Qwen/Qwen3-8B-GGUF:Q4_K_M", Reference("Qwen/Qwen3-8B-GGUF", quant="Q4_K_M")),
        ("hf:a/b.c/x-00001-of-00002.gguf", Reference("a/b.c", file="x-00001-of-00002.gguf")),
        ("hf:a/b/sub/x.gguf", Reference("a/b", file="sub/x.gguf")),
    ],
)
def test_a_hub_reference_names_a_repository_and_what_of_it(text: str, reference: Reference) -> None:
    assert parse(text) == reference


@pytest.mark.parametrize("text", ["hf:", "hf:a", "hf:a/", "hf:a/b:", "hf:a/b/c", "hf:a/b:Q4/x.gguf", "hf:a b/c"])
def test_a_malformed_hub_reference_is_answered_with_the_forms(text: str) -> None:
    with pytest.raises(UsageError, match=r"write hf:owner/repo, hf:owner/repo:QUANT or hf:owner/repo/file\.gguf"):
        parse(text)


def test_a_name_that_no_repository_can_have_is_one_line() -> None:
    with pytest.raises(DownloadError, match=r"a--b/c could not be fetched: Cannot have -- or \.\. in repo_id"):
        resolve("hf:a--b/c")


FILES = [
    "README.md",
    "m-Q8_0.gguf",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-UD-Q4_K_M.gguf",
    "mmproj-m-F16.gguf",
    "m.imatrix.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("reference", "chosen"),
    [
        (Reference("a/b"), ("m-Q4_K_M.gguf",)),
        (Reference("a/b", quant="q8_0"), ("m-Q8_0.gguf",)),
        (Reference("a/b", quant="UD-Q4_K_M"), ("m-UD-Q4_K_M.gguf",)),
        (Reference("a/b", quant="bf16"), tuple(FILES[-2:])),
        (Reference("a/b", file=FILES[-1]), tuple(FILES[-2:])),
        (Reference("a/b", file="mmproj-m-F16.gguf"), ("mmproj-m-F16.gguf",)),
    ],
)
def test_the_quantisation_chooses_the_file(reference: Reference, chosen: tuple[str, ...]) -> None:
    assert choose(reference, FILES) == chosen


@pytest.mark.parametrize("quant", ["Q4_K", "F16", "4", "Q4_K_"])
def test_a_part_of_a_quantisation_name_chooses_nothing(quant: str) -> None:
    with pytest.raises(DownloadError, match=rf"a/b has no {quant}, it has .*m-Q4_K_M\.gguf, "):
        choose(Reference("a/b", quant=quant), FILES)


def test_without_the_usual_quantisation_another_is_taken() -> None:
    assert choose(Reference("a/b"), ["m-Q8_0.gguf", "mmproj.gguf"]) == ("m-Q8_0.gguf",)


def test_a_repository_without_models_is_named() -> None:
    with pytest.raises(DownloadError, match="a/b has no model, it has no GGUF file of a language model"):
        choose(Reference("a/b"), ["model.safetensors", "mmproj.gguf"])


def test_a_model_is_fetched_into_the_cache_of_the_hub_and_shown(tmp_path: Path) -> None:
    repo = serve("a/b", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    progress = Recorder()
    model = resolve("hf:a/b", progress=progress)
    assert model.path.read_bytes() == repo.files["m-Q4_K_M.gguf"]
    assert model.path.is_relative_to(tmp_path / "hub/models--a--b/snapshots")
    assert progress.jobs == ["fetching m-Q4_K_M.gguf: 200004", "checking m-Q4_K_M.gguf: 200004"]
    assert (progress.done, progress.finished) == (2 * 200004, 2)


def test_a_model_in_the_cache_is_neither_fetched_nor_hashed_again() -> None:
    repo = serve("a/b", "m-Q4_K_M.gguf")
    first = resolve("hf:a/b").path
    repo.requests.clear()
    progress = Recorder()
    assert resolve("hf:a/b", progress=progress).path == first
    assert [request for request in repo.requests if "resolve" in request and request.startswith("GET")] == []
    assert progress.jobs == []


def test_all_parts_of_a_split_model_are_fetched_and_the_first_is_given() -> None:
    names = [f"m-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    repo = serve("a/b", *reversed(names))
    path = resolve(f"hf:a/b/{names[1]}").path
    assert [path.with_name(name).read_bytes() for name in names] == [repo.files[name] for name in names]
    assert path.name == names[0]


def test_missing_parts_of_a_split_model_are_named_before_anything_is_fetched() -> None:
    repo = serve("a/b", "m-00001-of-00003.gguf", "m-00003-of-00003.gguf")
    with pytest.raises(DownloadError, match=r"a/b has 2 of the 00003 parts .* lacks m-00002-of-00003\.gguf$"):
        resolve("hf:a/b")
    assert len(repo.requests) == 1


def test_B1_a_server_that_answers_a_resume_with_the_whole_file_gives_the_file_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo = serve("a/b", "m.gguf", cut_at=75_000, ranges=False)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    progress = Recorder()
    assert resolve("hf:a/b", progress=progress).path.read_bytes() == repo.files["m.gguf"]
    assert "GET a/b/resolve/main/m.gguf bytes=70000-" in repo.requests
    assert progress.done == 2 * 200004


def test_B1_a_server_that_obeys_the_range_gives_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = serve("a/b", "m.gguf", cut_at=75_000)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    progress = Recorder()
    assert resolve("hf:a/b", progress=progress).path.read_bytes() == repo.files["m.gguf"]
    assert "GET a/b/resolve/main/m.gguf bytes=70000-" in repo.requests
    assert progress.done == 2 * 200004


def test_B2_what_a_killed_client_left_is_not_taken_as_the_model(endpoint: Path, tmp_path: Path) -> None:
    repo = serve("a/b", "m.gguf", cut_at=100_000, hold=threading.Event())
    code = "import lever.models; lever.models.resolve('hf:a/b')"
    environ = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_DOWNLOAD_TIMEOUT": "30"}
    client = subprocess.Popen([sys.executable, "-c", code], env=environ, cwd=endpoint)
    while repo.cut_at is not None:
        assert client.poll() is None
        time.sleep(0.01)
    client.kill()
    client.wait()
    assert hub.cached_models() == []
    with pytest.raises(DownloadError, match="hf:a/b is not in the cache"):
        resolve("hf:a/b", offline=True)
    assert resolve("hf:a/b").path.read_bytes() == repo.files["m.gguf"]


@pytest.mark.parametrize("bare", [True, False])
def test_B3_a_page_in_place_of_the_model_is_refused_and_not_kept(bare: bool) -> None:
    repo = serve("a/b", "m.gguf", body=HTML, bare=bare)
    with pytest.raises(DownloadError, match=r"m\.gguf is not a GGUF \(got HTML\); is the .* gated\? set HF_TOKEN"):
        resolve("hf:a/b")
    assert hub.cached_models() == []
    repo.body = None
    assert resolve("hf:a/b").path.read_bytes() == repo.files["m.gguf"]


def test_B3_other_bytes_in_place_of_the_model_are_shown() -> None:
    serve("a/b", "m.gguf", body=b"PK\x03\x04")
    with pytest.raises(DownloadError, match=r"not a GGUF \(got 'PK\\x03\\x04'\)"):
        resolve("hf:a/b")


@pytest.mark.parametrize("page", [HTML, b"[]", b"{}", b"null", b""])
def test_B3_a_page_in_place_of_the_list_of_files_is_refused(page: bytes) -> None:
    serve("a/b", "m.gguf", listing=page)
    with pytest.raises(DownloadError, match=r"does not answer like a model hub for a/b: is a proxy"):
        resolve("hf:a/b")


def test_B1_a_file_of_the_right_size_and_wrong_bytes_is_refused_and_not_kept() -> None:
    repo = serve("a/b", "m.gguf")
    repo.body = gguf()
    with pytest.raises(DownloadError, match=r"m\.gguf came damaged, its SHA-256 is not the hub's"):
        resolve("hf:a/b")
    assert hub.cached_models() == []
    repo.body = None
    assert resolve("hf:a/b").path.read_bytes() == repo.files["m.gguf"]


def test_B1_a_file_of_another_size_than_listed_is_refused() -> None:
    serve("a/b", "m.gguf", body=gguf(10))
    with pytest.raises(DownloadError, match=r"m\.gguf came with 14 bytes, the hub lists 200004"):
        resolve("hf:a/b")
    assert hub.cached_models() == []


def test_B4_a_slow_server_is_waited_for_as_long_as_it_sends() -> None:
    repo = serve("a/b", "m.gguf", slow=0.4)  # 1.6 s in all, with an idle timeout of 1 s
    assert resolve("hf:a/b").path.read_bytes() == repo.files["m.gguf"]


def test_B5_a_changed_file_is_fetched_and_offline_takes_the_copy() -> None:
    repo = serve("a/b", "m.gguf")
    old = resolve("hf:a/b").path.read_bytes()
    repo.files["m.gguf"], repo.commit = gguf(), "2" * 40
    repo.requests.clear()
    assert resolve("hf:a/b", offline=True).path.read_bytes() == old
    assert repo.requests == []
    new = repo.files["m.gguf"]
    assert resolve("hf:a/b").path.read_bytes() == new
    assert resolve("hf:a/b", offline=True).path.read_bytes() == new


def test_B5_a_copy_damaged_on_disk_is_noticed_and_fetched_again() -> None:
    repo = serve("a/b", "m.gguf")
    path = resolve("hf:a/b").path
    path.resolve().write_bytes(gguf())
    with pytest.raises(DownloadError, match=r"m\.gguf came damaged"):
        resolve("hf:a/b")
    assert resolve("hf:a/b").path.read_bytes() == repo.files["m.gguf"]


def test_B5_a_hub_that_changes_while_a_file_is_fetched_asks_to_try_again() -> None:
    repo = serve("a/b", "m.gguf")
    repo.listing = listing("a/b", repo)
    repo.commit = "2" * 40
    with pytest.raises(DownloadError, match=r"a/b changed or could not be reached while m\.gguf was fetched"):
        resolve("hf:a/b")


def test_offline_works_from_the_cache_and_names_what_is_missing() -> None:
    repo = serve("a/b", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    path = resolve("hf:a/b").path
    repo.drop = True
    assert resolve("hf:a/b", offline=True).path == path
    with pytest.raises(DownloadError, match=r"a/b has no Q8_0, it has m-Q4_K_M\.gguf$"):
        resolve("hf:a/b:Q8_0", offline=True)
    with pytest.raises(DownloadError, match=r"hf:c/d is not in the cache: fetch it without --offline"):
        resolve("hf:c/d", offline=True)


def test_the_offline_variable_of_the_hub_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = serve("a/b", "m.gguf")
    path = resolve("hf:a/b").path
    repo.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve("hf:a/b").path == path
    assert repo.requests == []


def test_the_token_variable_of_the_hub_opens_a_private_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = serve("a/b", "m.gguf", token="secret")
    with pytest.raises(DownloadError, match="a/b does not exist or is private: check the name, or set HF_TOKEN"):
        resolve("hf:a/b")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert resolve("hf:a/b").path.read_bytes() == repo.files["m.gguf"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            (403, "GatedRepo"),
            r"a/b is gated: accept its terms at http://127\.0\.0\.1:\d+/a/b, then set HF_TOKEN",
        ),
        ((404, "RepoNotFound"), r"a/b does not exist or is private"),
        ((403, "Other"), r"refused a/b \(HTTP 403\): set HF_TOKEN"),
        ((400, "Other"), r"refused a/b \(HTTP 400\): try again later"),
        ((500, "Other"), r"refused a/b \(HTTP 500\): try again later"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line(status: tuple[int, str], words: str) -> None:
    serve("a/b", "m.gguf", status=status)
    with pytest.raises(DownloadError, match=words) as caught:
        resolve("hf:a/b")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 5


def test_a_hub_that_cannot_be_reached_is_one_line() -> None:
    serve("a/b", "m.gguf", drop=True)
    with pytest.raises(DownloadError, match=r"http://.* cannot be reached \(.*\): .* or use --offline") as caught:
        resolve("hf:a/b")
    assert "\n" not in str(caught.value)


def test_a_listed_file_that_is_not_there_is_one_line() -> None:
    repo = serve("a/b", "m.gguf")
    repo.listing = listing("a/b", repo)
    repo.files = {}
    with pytest.raises(DownloadError, match="a/b lists a file that it does not have: ") as caught:
        resolve("hf:a/b")
    assert "\n" not in str(caught.value)


def test_a_file_name_that_leaves_the_cache_is_refused(tmp_path: Path) -> None:
    serve("a/b", "../../../../evil.gguf")
    with pytest.raises(DownloadError, match=r"a/b could not be fetched: .*evil\.gguf"):
        resolve("hf:a/b")
    assert list(tmp_path.rglob("evil*")) == []


def test_A5_too_small_a_disk_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = serve("a/b", "m.gguf")
    usage = shutil.disk_usage("/")._replace(free=1024)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DownloadError, match=r"195 KiB are needed and 1 KiB are free: .*HF_HOME"):
        resolve("hf:a/b")
    assert not [request for request in repo.requests if "resolve" in request]


def test_without_the_library_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lever.models.hub.find_spec", lambda _: None)
    with pytest.raises(DownloadError, match=r"hf:a/b needs .* pip install 'lever-llm\[hub\]', or uv sync --extra"):
        resolve("hf:a/b")
    assert list_models() == []


def test_models_of_the_hub_are_listed_by_the_names_that_resolve_takes() -> None:
    names = ["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"]
    serve("a/b", *names, "README.md")
    serve("c/d", "sub/x-Q8_0.gguf")
    paths = [resolve(ref).path for ref in ("hf:a/b", "hf:c/d")]
    models = list_models()
    assert [(m.name, m.path, m.bytes, m.source) for m in models] == [
        ("hf:a/b/m-Q4_K_M-00001-of-00002.gguf", paths[0], 2 * 200004, "hub"),
        ("hf:c/d/sub/x-Q8_0.gguf", paths[1], 200004, "hub"),
    ]
    assert [resolve(model.name, offline=True).path for model in models] == paths


def test_a_removed_model_is_gone_and_others_stay(tmp_path: Path) -> None:
    serve("a/b", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    resolve("hf:a/b:Q4_K_M")
    kept = resolve("hf:a/b:Q8_0").path
    assert remove("hf:a/b:q4_k_m") == Removed(200004)
    assert [model.path for model in list_models()] == [kept]
    assert len(list((tmp_path / "hub/models--a--b/blobs").iterdir())) == 1
    assert len(list((tmp_path / "lever/verified").iterdir())) == 1


def test_every_revision_of_a_model_is_removed() -> None:
    repo = serve("a/b", "m.gguf")
    resolve("hf:a/b")
    repo.files["m.gguf"], repo.commit = gguf(), "2" * 40
    resolve("hf:a/b")
    (model,) = list_models()
    assert model.bytes == 2 * 200004
    assert remove(model.name) == Removed(2 * 200004)
    assert list_models() == []


def test_the_flash_image_of_a_model_is_listed_and_removed_with_it() -> None:
    """One of another revision, with other bytes, has an image of its own; it goes too."""
    repo = serve("a/b", "m.gguf")
    old = image_path(resolve("hf:a/b").path)
    repo.files["m.gguf"], repo.commit = gguf(), "2" * 40
    new = image_path(resolve("hf:a/b").path)
    assert new != old
    old.parent.mkdir()
    old.write_bytes(bytes(5))
    new.write_bytes(bytes(9))
    model, lone = list_models()
    assert (model.images, model.image_bytes) == ((new,), 9)
    assert (lone.path, lone.bytes, lone.source) == (old, 5, "image")
    assert remove(model.name) == Removed(2 * 200004, 14)
    assert list_models() == []


def test_removing_what_is_not_in_the_cache_is_a_usage_error() -> None:
    serve("a/b", "m.gguf")
    resolve("hf:a/b")
    with pytest.raises(UsageError, match=r"no model 'hf:a/c' in the cache.* known: hf:a/b/m\.gguf$"):
        remove("hf:a/c")
