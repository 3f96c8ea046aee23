"""How far long work on files has come."""

from __future__ import annotations


class CareProgress:
    """Told what is being done, and how many bytes of it. This one is silent."""

    def note(self, what: str) -> None:
        """Something begins that has no measure."""

    def expect(self, nbytes: int) -> None:
        """So many bytes are to be read or written, as far as is known."""

    def advance(self, nbytes: int) -> None:
        """So many more have been."""


SILENT = CareProgress()
