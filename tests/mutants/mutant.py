"""One mutant: a piece of a source file, what stands there instead, and the tests that should notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class StaleMutant(ValueError):
    """The mutant's old text does not occur exactly once in its file: the list has fallen behind the source."""


@dataclass(frozen=True)
class Mutant:
    """``old`` replaced by ``new`` in ``file`` (a path from the root of the repository); ``tests`` are pytest's node ids or files.

    ``equivalent`` says why no test can notice it (the change has no effect that anybody sees): the mutant must then survive. Such a mutant
    is listed so that nobody looks for its test again; the reason fails loudly once it is no longer true.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def applied_to(self, root: Path) -> str:
        """The text of the file under ``root`` with the mutant in it.

        Raises:
            StaleMutant: ``old`` occurs never, or more than once, or the file is missing.
        """
        path = root / self.file
        if not path.is_file():
            raise StaleMutant(f"{self.name}: {self.file} does not exist")
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise StaleMutant(f"{self.name}: its text occurs {count} times in {self.file}, not once: {self.old!r}")
        return text.replace(self.old, self.new)
