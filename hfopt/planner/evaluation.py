"""The batch of the evaluation, where the config evaluates: it keeps no activations, so it can hold what the training step can."""

from __future__ import annotations

from hfopt.planner.choices import defaults
from hfopt.planner.pricing import Pricing
from hfopt.planner.request import Subject
from hfopt.probe.arguments import evaluates
from hfopt.schema import Candidate

KEY = "per_device_eval_batch_size"


def eval_batch(subject: Subject, pricing: Pricing, winner: Candidate) -> tuple[int, str] | None:
    """The new value with its reason; None where the config's own stays."""
    args = subject.job.args
    if not evaluates(args):
        return None
    now = int(args.get(KEY) or defaults()[KEY])
    limit = pricing.known_limit(winner) or winner.per_device_batch
    wanted = min(limit, 2 * winner.per_device_batch)
    wanted = wanted // 8 * 8 if wanted >= 8 else wanted
    if wanted <= now <= limit:
        return None
    why = "evaluation keeps no activations: it can hold what training holds" if wanted > now else f"at most {limit} is known to fit"
    return wanted, why


def tried_eval_batch(subject: Subject, pricing: Pricing, winner: Candidate) -> int | None:
    """What a dry run evaluates with: the planned batch, which is the config's own where that is kept."""
    planned = None if KEY in subject.job.kept else eval_batch(subject, pricing, winner)
    return None if planned is None else planned[0]
