"""Fair shares per tenant: virtual token counters."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvlab.policies.base import PrefixesView, SchedulingPolicy, is_number, require
from kvlab.types import GroupView, Now, QueuesView


class Vtc(SchedulingPolicy):
    """The tenant that has been served least goes first: each has a counter of the tokens it was served, the least counter's earliest
    request enters, and a tenant that was away does not come back with credit.

    Source: Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024),
        https://arxiv.org/abs/2401.00588, algorithm 2 and (tenant_weights) its weighted variant.
    Parameters: input_weight: service per prompt token, charged at admission. output_weight: per output token, charged as it comes.
        tenant_weights: {tenant: share}; those not named have 1.
    Deviations: a preempted request comes back first and is not charged again (theirs are never preempted); tokens found in the prefix
        cache are charged like others. A tenant whose requests all run or are preempted counts as one that has none waiting.
    """

    is_static = False

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0, tenant_weights: Mapping[str, float] | None = None) -> None:
        for name, value in (("input_weight", input_weight), ("output_weight", output_weight)):
            require(is_number(value) and value >= 0, self, name, value, "a number, at least 0")
        weights = tenant_weights if isinstance(tenant_weights, Mapping) else {}
        right = (tenant_weights is None or isinstance(tenant_weights, Mapping)) and all(is_number(w) and w > 0 for w in weights.values())
        require(right, self, "tenant_weights", tenant_weights, "null or {tenant: share, more than 0}")
        self.input_weight = input_weight
        self.output_weight = output_weight
        self.tenant_weights = tenant_weights
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.counters: dict[str, float] = {}
        """Service of each tenant so far, by its weight."""
        self._waiting: dict[int, str] = {}  # group id -> tenant, of requests that have never run
        self._num_waiting: dict[str, int] = {}
        self._last_to_leave = ""

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """Its tenant's counter (the order of a queue needs more: see `order`)."""
        return (self.counters.get(group.tenant, 0.0), group.arrival_s)

    def order(self, waiting: Sequence[GroupView], prefixes: PrefixesView, now: Now) -> Iterable[GroupView]:
        """As the counters would choose if all entered one after the other, each charged for its prompt as it does."""
        by_tenant: defaultdict[str, list[GroupView]] = defaultdict(list)
        for group in waiting:
            by_tenant[group.tenant].append(group)
        heap = [(self.counters.get(tenant, 0.0), groups[0].group_id, tenant, 0) for tenant, groups in by_tenant.items()]
        heapq.heapify(heap)
        while heap:
            counter, _, tenant, num_gone = heap[0]
            groups = by_tenant[tenant]
            group = groups[num_gone]
            num_gone += 1
            if num_gone < len(groups):
                counter += self._service(tenant, group.num_prompt_tokens, 0)
                heapq.heapreplace(heap, (counter, groups[num_gone].group_id, tenant, num_gone))
            else:
                heapq.heappop(heap)
            yield group

    def arrived(self, group: GroupView, queues: QueuesView, now: Now) -> None:
        """A tenant with nothing waiting is lifted to the least counter of those that wait, or to that of the last to leave."""
        tenant = group.tenant
        counter = self.counters.setdefault(tenant, 0.0)
        if not self._num_waiting.get(tenant):
            others = [self.counters[other] for other, num in self._num_waiting.items() if num]
            lift = min(others) if others else self.counters.get(self._last_to_leave, 0.0)
            self.counters[tenant] = max(counter, lift)
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1
        self._waiting[group.group_id] = tenant

    def entered(self, group: GroupView, kind: str, now: Now) -> None:
        """Its prompt is charged, once."""
        if kind == "new":
            self.counters[group.tenant] = self.counters.get(group.tenant, 0.0) + self._service(group.tenant, group.num_prompt_tokens, 0)
            self._leave(group)

    def computed(self, group: GroupView, num_computed_tokens: int, num_output_tokens: int, now: Now) -> None:
        """Its output is charged."""
        self.counters[group.tenant] = self.counters.get(group.tenant, 0.0) + self._service(group.tenant, 0, num_output_tokens)

    def ended(self, group: GroupView, now: Now) -> None:
        """One that never ran leaves the queue."""
        self._leave(group)

    def _leave(self, group: GroupView) -> None:
        tenant = self._waiting.pop(group.group_id, None)
        if tenant is not None:
            self._num_waiting[tenant] -= 1
            self._last_to_leave = tenant

    def _service(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> float:
        service = self.input_weight * num_prompt_tokens + self.output_weight * num_output_tokens
        return service / (self.tenant_weights or {}).get(tenant, 1.0)
