"""The figures of one run, under the names that other tools read. Measures nothing itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True, kw_only=True)
class RunStats:
    """One answer. Seconds, bytes and counts; everything but prefill_s and prompt_tokens is of the decode phase.

    read_s is time inside reads, stall_s time that compute waited for them; read_bytes_per_s is read_bytes over the
    whole decode phase, which is what the storage delivered. python_s is decode time outside ggml and outside waits.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the KV cache
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cycles: int = 0  # passes over the target's layers
    plain_cycles: int = 0  # that checked no candidate
    looked_up: int = 0  # cycles whose candidates came from the text itself
    drafted: int = 0
    verified: int = 0
    pruned: int = 0  # of the verified: candidates that had a row in the lower layers alone
    pruned_cycles: int = 0  # whose rows were looked at behind a middle layer
    prune_s: float = 0.0  # spent on that
    accepted: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    direct_io: bool = True
    buffered_reason: str | None = None  # why not, where reads go through the page cache
    stall_s: float = 0.0
    upload_bytes: int = 0  # to the devices that compute, if not the CPU: weights, rows, masks
    upload_s: float = 0.0
    download_bytes: int = 0  # from them: logits, hidden rows
    draft_s: float = 0.0
    draft_hidden_s: float = 0.0
    verify_s: float = 0.0  # of the target's layers, compute only
    project_s: float = 0.0  # of its output projection, compute only
    python_s: float = 0.0
    exact: bool = True  # all logits had the bits of plain decoding
    near_ties: int = 0  # of the tokens where they had not: the two best logits were so close that it could matter
    peak_rss_bytes: int = 0
    dram_budget_bytes: int = 0
    dram_planned_bytes: int = 0
    pinned_share: float = 0.0  # of the bytes of the layers, kept in DRAM
    layout: str = "plain"  # of the weights: as a GGUF holds them, or "repacked" as the kernels want them
    image: str | None = None  # of a flash image: what it holds
    n_ctx: int = 0
    seed: int = 0
    preset: str = "flash-ar"
    prune: str = "off"  # how, where a predictor is there
    predictor: str | None = None  # its file
    model: str = ""
    draft: str | None = None
    device: str = "cpu"  # that computes the layers
    draft_device: str | None = None  # that computes a draft
    ggml: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the decode phase per second; the first token belongs to prefill."""
        return max(self.new_tokens - 1, 0) / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens that a pass over the target's layers brings."""
        return max(self.new_tokens - 1, 0) / self.cycles if self.cycles else 0.0

    @property
    def read_bytes_per_s(self) -> float:
        """What the storage delivered over the decode phase."""
        return self.read_bytes / self.decode_s if self.decode_s else 0.0

    def to_dict(self) -> dict[str, object]:
        """All figures, derived ones included, for JSON."""
        return {
            **asdict(self),
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_cycle": self.tokens_per_cycle,
            "read_bytes_per_s": self.read_bytes_per_s,
        }
