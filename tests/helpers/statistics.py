"""Do frequencies follow given probabilities? With a bound that holds for every sample size."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)
FALSE_ALARM = 1e-6  # chance that one call fails although the probabilities are right


def check_frequencies(samples: Iterable[Outcome], probabilities: Mapping[Outcome, float]) -> None:
    """Every outcome as often as its probability allows, and no other outcome.

    Chernoff: a fraction f of n independent samples, or one further off, has at most the chance
    2 exp(-n KL(f, p)). The outcomes share the false alarm.
    """
    counts = Counter(samples)
    total = counts.total()
    bound = math.log(2 * len(probabilities) / FALSE_ALARM)
    assert counts.keys() <= probabilities.keys()
    assert math.isclose(sum(probabilities.values()), 1.0)
    for outcome, probability in probabilities.items():
        fraction = counts[outcome] / total
        surprise = total * _divergence(fraction, probability)
        assert surprise <= bound, f"{outcome}: {fraction} instead of {probability}"


def _divergence(f: float, p: float) -> float:
    """KL of two coins in nats."""
    terms = ((f, p), (1 - f, 1 - p))
    return sum(a * (math.log(a / b) if b > 0 else math.inf) for a, b in terms if a > 0)
