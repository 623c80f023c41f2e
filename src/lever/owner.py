"""What owns something that must be given back: `close`, once or more often, or by leaving a `with`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Owner(ABC):
    """Closes when its `with` is left. `close` may be called again, and after a constructor that failed."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is owned."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
