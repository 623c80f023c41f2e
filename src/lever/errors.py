"""The exceptions that lever raises for what a user, a file or a machine did. Knows nothing else of lever.

    LeverError                  1   a run went wrong
    ├── UsageError              2   words or flags that make no sense
    │   └── MissingExtra            what needs a package that is not installed
    ├── DoesNotFit              3   the memory budget cannot hold what was asked
    ├── ModelError              4   a model file that cannot be used
    │   ├── GGUFError               damaged, cut, or not a GGUF at all
    │   ├── DamagedImage            a flash image whose bytes are not those that were packed
    │   ├── UnsupportedModel        sound, but lever does not run its kind
    │   ├── TokenizerError          its vocabulary is not usable
    │   └── TemplateError           its chat template is not usable
    ├── StorageError            5   the storage failed, or a file changed while in use
    │   └── DownloadError           a model could not be fetched
    ├── Cancelled             130   somebody does not want the answer any more
    ├── ContextOverflow         1   more tokens than the context holds
    ├── DeviceLost              1   what computes elsewhere is not there, or not there any more
    ├── ProfileError            1   a kept profile of this machine is damaged or of another version
    └── LibraryError            1   ggml is missing, of another version, or computes wrongly

The number is the exit code of the command line. Messages are one line: what is wrong, where, and how to mend it.
Broken invariants of lever itself are `assert`, never one of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class LeverError(Exception):
    """Root of every error that lever raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(LeverError):
    """Arguments that contradict each other or lie outside their range."""

    exit_code = 2


class MissingExtra(UsageError):
    """A package of one of lever's extras is not installed; the message says how to."""


class DoesNotFit(LeverError):
    """The DRAM budget is too small; the message names each part and ways to fit."""

    exit_code = 3

    def __init__(self, message: str, parts: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.parts = dict(parts or {})  # bytes by name, where a plan was made


class ModelError(LeverError):
    """A model file that cannot be used."""

    exit_code = 4


class GGUFError(ModelError):
    """The file is damaged, cut short, or not a GGUF."""


class DamagedImage(ModelError):
    """A block of a flash image does not have its checksum."""


class UnsupportedModel(ModelError):
    """The file is sound, but of a kind that lever does not run."""


class TokenizerError(ModelError):
    """The vocabulary in the file is inconsistent or of an unknown kind."""


class TemplateError(ModelError):
    """The chat template is missing, fails to render, or tries what a template must not."""


class StorageError(LeverError):
    """Reading or writing failed: EIO, a short file, a full disk, a file that changed while in use."""

    exit_code = 5


class DownloadError(StorageError):
    """A model could not be fetched or assembled."""


class Cancelled(LeverError):
    """The answer was given up between two layers, at somebody's wish."""

    exit_code = 130  # what a shell expects after Ctrl-C


class ContextOverflow(LeverError):
    """Prompt and answer need more positions than the context has."""


class DeviceLost(LeverError):
    """A device cannot be reached, has gone away, or does not answer as it should."""


class ProfileError(LeverError):
    """What is kept of a machine's speed cannot be used; it is measured anew."""


class LibraryError(LeverError):
    """ggml cannot be loaded, has another version than the pinned one, or fails its self-test."""
