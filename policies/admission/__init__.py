"""May a group enter running now? Asked whenever something runs; growth of a running group is never asked."""

from kvlab.policies.admission.adaptive import Adaptive
from kvlab.policies.admission.expected_output import ExpectedOutput
from kvlab.policies.admission.full_sequence import FullSequence
from kvlab.policies.admission.none import Unlimited
from kvlab.policies.admission.past_future import PastFuture
from kvlab.policies.admission.reserve_all import ReserveAll
from kvlab.policies.admission.watermark import Watermark

__all__ = ["Adaptive", "ExpectedOutput", "FullSequence", "PastFuture", "ReserveAll", "Unlimited", "Watermark"]
