"""Pipeline parallelism on torch.distributed.pipelining: every stock schedule, one replay per block and micro-batch.

stage    = regrow.pipelining.PipelineStage(module, stage_index, num_stages, device)
schedule = ScheduleZBVZeroBubble([stage, ...], n_microbatches, loss_fn=loss_fn)  # torch's own, unchanged
regrow.pipelining.attach(schedule)
schedule.step(x, target=y)
"""

from regrow.pipelining.attaching import attach, detach
from regrow.pipelining.one_f_one_b import schedule_1f1b
from regrow.pipelining.stage import PipelineStage

__all__ = ["PipelineStage", "attach", "detach", "schedule_1f1b"]
