"""A report on tensors: who holds what, by shape and type, storages once. Must never keep a tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from regrow._core.storages import storage_bytes
from regrow.trace.text import in_bytes, table


class Found(NamedTuple):
    """A tensor, who holds it, and as what."""

    where: str
    kind: str
    session: str
    tensor: torch.Tensor


@dataclass(slots=True)
class Row:
    """Tensors of one holder that look alike.

    Attributes:
        where: the function, with its module path where known, or the node of the graph.
        kind: as what it is held.
        session: for which session, or which backward; empty where it belongs to the call.
        count: how many tensors.
        held_bytes: of their storages; one that stands in a row above counts there.
    """

    where: str
    kind: str
    session: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    count: int = 0
    held_bytes: int = 0


class Report:
    """Rows, as text and as JSON.

    Attributes:
        rows: the largest first.
        total_bytes: of all rows; a storage counts once.
    """

    def __init__(self, rows: list[Row]) -> None:
        self.rows = sorted(rows, key=lambda row: -row.held_bytes)
        self.total_bytes = sum(row.held_bytes for row in rows)

    def bytes_by(self, name: str) -> dict[str, int]:
        """Bytes added up by a field of the rows: "where", "kind", "session", "dtype" or "device"."""
        found: dict[str, int] = {}
        for row in self.rows:
            key = str(getattr(row, name))
            found[key] = found.get(key, 0) + row.held_bytes
        return found

    def __str__(self) -> str:
        head = ("held by", "as", "session", "shape", "type", "device", "count", "bytes")
        cells = [_cells(row) for row in self.rows]
        return table(head, [*cells, ["all", "", "", "", "", "", "", in_bytes(self.total_bytes)]])

    __repr__ = __str__

    def to_json(self) -> str:
        """Rows and sum as JSON."""
        return json.dumps({"version": 1, "total_bytes": self.total_bytes, "rows": list(map(asdict, self.rows))})


def _cells(row: Row) -> list[str]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    return [row.where, row.kind, row.session, shape, row.dtype, row.device, str(row.count), in_bytes(row.held_bytes)]


def report(found: Iterable[Found], *, seen: set[int] | None = None) -> Report:
    """Add tensors up, in the order in which they come.

    Args:
        found: the tensors.
        seen: storages that count elsewhere.
    """
    seen = set() if seen is None else seen
    rows: dict[tuple[object, ...], Row] = {}
    for where, kind, session, tensor in found:
        look = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device)
        row = rows.setdefault((where, kind, session, *look), Row(where, kind, session, *look))
        row.count += 1
        for storage, n_bytes in storage_bytes([tensor]).items():
            if storage not in seen:
                seen.add(storage)
                row.held_bytes += n_bytes
    return Report(list(rows.values()))
