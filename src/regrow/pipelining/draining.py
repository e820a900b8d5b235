"""Draining: brings every message of an aborted step to its end, so that none reaches the next one.

Messages between two ranks have no names: the first that is sent meets the first receive that is posted. When every rank
has raised, each tells what it sent and what it posted receives for; whatever lacks its other half is given one.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from regrow.pipelining import _compat
from regrow.pipelining.stage import Message, PipelineStage

# What a rank tells the others: messages it sent, and messages it posted receives for.
_Told = dict[str, list[Message]]


def drain(stages: list[PipelineStage], step: str, wait_s: float) -> bool:
    """Complete the messages of an aborted step.

    Args:
        stages: all stages of this rank.
        step: a name for the step that all ranks agree on.
        wait_s: how long to wait for the others to say that they raised, too.

    Returns:
        False if one of them did not: it may still send, or wait for a message.
    """
    group = stages[0].group or dist.group.WORLD
    assert group is not None
    rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
    store = _compat.store(f"regrow/{group.group_name}/{step}")
    others = [other for other in range(n_ranks) if other != rank]
    try:
        store.set(str(rank), json.dumps(_told(stages)))
        store.wait([str(other) for other in others], timedelta(seconds=wait_s))
        store.set(f"{rank} heard all", "")  # one of them may have given up by now
        store.wait([f"{other} heard all" for other in others], timedelta(seconds=wait_s))
    except dist.DistError:
        return False
    told = [json.loads(store.get(str(other))) for other in range(n_ranks)]
    sent = Counter(tuple(message) for each in told for message in each["sent"])
    posted = Counter(tuple(message) for each in told for message in each["posted"])
    works = _meet(stages, sent - posted, posted - sent)
    for work in works:
        work.wait()
    return True


def _told(stages: list[PipelineStage]) -> _Told:
    return {
        "sent": [message for stage in stages for message in stage.messages.sent],
        "posted": [message for stage in stages for message in stage.messages.posted],
    }


def _meet(stages: list[PipelineStage], unmet: Counter[Message], awaited: Counter[Message]) -> list[dist.Work]:
    """Post a receive for what was sent here, and send what is awaited from here, in the order of the lists."""
    works: list[dist.Work] = []
    for message in unmet.elements():
        kind, sender, index = message
        works += [
            _posted(operation)
            for stage in stages
            if stage.stage_index == _receiver(kind, sender)
            for operation in stage.receives(kind, index)
        ]
    for message in awaited.elements():
        kind, sender, _ = message
        works += [
            _sent(torch.empty(shape, dtype=dtype, device=stage.device), stage, peer)
            for stage in stages
            if stage.stage_index == sender
            for shape, dtype, peer in stage.shapes(kind)
        ]
    return works


def _receiver(kind: str, sender: int) -> int:
    return sender + 1 if kind == "forward" else sender - 1


def _posted(operation: dist.P2POp) -> dist.Work:
    work = dist.irecv(operation.tensor, group=operation.group, group_src=operation.group_peer)
    assert work is not None
    return work


def _sent(tensor: torch.Tensor, stage: PipelineStage, peer: int) -> dist.Work:
    work = dist.isend(tensor, group=stage.group, group_dst=peer)
    assert work is not None
    return work
