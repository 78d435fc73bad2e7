"""The learning rate of each step."""

from math import cos, pi

from plait.spec.findings import UserError, closest, error
from plait.spec.job import Train

SCHEDULES = ("cosine", "wsd", "constant")


def learning_rate(step: int, train: Train) -> float:
    """The learning rate of a step (the first is 0, the last `train.steps` - 1).

    Linear warm-up comes first: step `warmup` - 1 has the peak. Then
        cosine    half a cosine down to `min_learning_rate`, which the last step has (1608.03983)
        wsd       the peak, then over the last `decay` steps a line down to the minimum
                  (MiniCPM 2404.06395, section 4)
        constant  the peak

    Raises:
        UserError: no schedule has that name.
    """
    if train.schedule not in SCHEDULES:
        names = ", ".join(SCHEDULES)
        message = f"schedule {train.schedule!r} is none of {names}"
        nearest = closest(train.schedule, SCHEDULES)
        raise UserError([error("train.schedule", train.schedule, message, nearest)])
    peak, low = train.learning_rate, train.min_learning_rate
    done = step + 1  # steps made when this one ends
    if done <= train.warmup:
        return peak * done / train.warmup
    if train.schedule == "constant":
        return peak
    start = train.warmup
    if train.schedule == "wsd":
        start = max(start, train.steps - train.decay)
    if done <= start:
        return peak
    # A run that goes on past its last step stays at the minimum.
    along = min(1.0, (done - start) / max(1, train.steps - start))
    share = (1 + cos(pi * along)) / 2 if train.schedule == "cosine" else 1 - along
    return low + (peak - low) * share
