"""The text to train on: real files, read as bytes in a fixed order. Must never fetch anything."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regrow.cli.counts import counted

_READ_LIMIT_BYTES = 4 << 20
_INSTALLED = {"site-packages", "dist-packages"}  # lie inside the standard library, and differ from machine to machine


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and, for each, the token that follows: (pieces, length) int64."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as one row of bytes, and what to call it."""

    label: str
    text: Tensor

    def draw(self, n_pieces: int, length: int, *, seed: int, device: torch.device) -> Batch:
        """Pieces of the text from random places; the same seed draws the same pieces.

        Args:
            n_pieces: how many.
            length: bytes in a piece.
            seed: what the places are drawn from. No global generator moves.
            device: where the batch shall lie.
        """
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.text) - length, (n_pieces, 1), generator=generator)
        pieces = self.text[starts + torch.arange(length + 1)].to(device=device, dtype=torch.int64)
        return Batch(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())

    def fingerprint(self) -> str:
        """The same for the same text only."""
        return hashlib.sha256(self.text.numpy().tobytes()).hexdigest()


def load(path: Path | None, *, length: int) -> Corpus:
    """Read the text.

    Args:
        path: a file, or a folder of text files. None is the source code of Python's standard library.
        length: bytes in a piece of text; the corpus must be longer.

    Raises:
        ValueError: nothing is there, nothing can be read, or it is too short. The message says what to do.

    Memory: at most 4 MiB are read, and kept as long as the corpus.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found = path or library
    if not found.exists():
        raise ValueError(f"--corpus: {found} does not exist. Name a text file, or a folder of text files.")
    try:
        text, n_skipped = _read(_files(found) if path else _sources(library))
    except OSError as error:
        raise ValueError(f"--corpus: {found} cannot be read ({error.strerror}). Name another file or folder.") from None
    if len(text) <= length:
        skipped = f" ({counted(n_skipped, 'file')} with NUL bytes skipped, which are not text)" if n_skipped else ""
        raise ValueError(
            f"--corpus: {found} holds {counted(len(text), 'byte')} of text{skipped}, one piece needs {length + 1}. "
            "Name a longer text."
        )
    label = str(path) if path else "the source code of Python's standard library"
    return Corpus(label, torch.frombuffer(text, dtype=torch.uint8))


def _read(files: Iterable[Path]) -> tuple[bytearray, int]:
    """The contents of files, one after the other, up to the limit; and how many hold a NUL byte, so are no text."""
    text, n_skipped = bytearray(), 0
    for file in files:
        content = file.read_bytes()
        if b"\0" in content:
            n_skipped += 1
        else:
            text += content[: _READ_LIMIT_BYTES - len(text)]
        if len(text) == _READ_LIMIT_BYTES:
            break
    return text, n_skipped


def _sources(library: Path) -> Iterator[Path]:
    """The library's own modules, sorted by name; not the packages installed below it."""
    for file in sorted(library.rglob("*.py")):
        if not _INSTALLED.intersection(file.relative_to(library).parts):
            yield file


def _files(path: Path) -> Iterator[Path]:
    """The file itself, or the files of a folder sorted by name; hidden ones stay out."""
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file
