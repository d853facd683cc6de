"""PipeMax with one thing changed, as the paper's ablations have it."""

from collections.abc import Callable, Iterator
from enum import StrEnum

from pipemax.control.controller import Controller
from pipemax.control.controller_config import ControllerConfig
from pipemax.control.planners.prefetch import PrefetchPlanner
from pipemax.control.planners.selection import Basket
from pipemax.control.state.batches import Batch
from pipemax.control.state.request import RequestState
from pipemax.domain.plan import PrefetchMode
from pipemax.sim.links import Direction
from pipemax.sim.machine import Machine
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions
from pipemax.sim.systems.scenario import Scenario


class StaticPrefetch(PrefetchPlanner):
    """Prefetches a share of the GPU pool in each iteration, oldest first, whatever the budget."""

    fraction: float

    def budget(self, stage_s: tuple[float, ...]) -> int:
        return int(self.fraction * self._config.gpu_blocks)

    def select(self, basket: Basket, stage_s: tuple[float, ...], gap_s: float) -> PrefetchMode:
        for state in self._table.parked_by_age():
            if state.id in basket.ids:
                continue
            if not basket.fits(state):
                break
            basket.add(state)
        return PrefetchMode.STATIC


class StaticController(Controller):
    """A controller with ``StaticPrefetch``."""

    def __init__(self, config: ControllerConfig, fraction: float) -> None:
        self._fraction = fraction
        super().__init__(config)

    def _begin(self, config: ControllerConfig) -> None:
        super()._begin(config)
        self._prefetch = StaticPrefetch(config, self._table, self._rotation, self._times)
        self._prefetch.fraction = self._fraction


class StaticPrefetchSystem(PipeMaxSystem):
    """The simulation of a fixed share."""

    def __init__(self, scenario: Scenario, options: PipeMaxOptions, *, fraction: float) -> None:
        self._fraction = fraction
        super().__init__(scenario, options)

    def make_controller(self, config: ControllerConfig) -> Controller:
        return StaticController(config, self._fraction)


class VictimPolicy(StrEnum):
    """Which members of a batch are evicted first; PipeMax, §3.3.2, gives no order."""

    LONGEST_FIRST = "longest_first"  # fewest requests displaced per block
    SHORTEST_FIRST = "shortest_first"  # cheapest to prefetch again
    OLDEST_FIRST = "oldest_first"  # longest on the GPU: every request gets its turn
    NEWEST_FIRST = "newest_first"  # came last: a stable core stays, the rest rotates


class OrderedBatch(Batch):
    """A batch whose members are evicted in another order."""

    def __init__(self, policy: VictimPolicy) -> None:
        super().__init__()
        self._policy = policy

    def victims(self) -> Iterator[RequestState]:
        orders: dict[VictimPolicy, Callable[[], Iterator[RequestState]]] = {
            VictimPolicy.LONGEST_FIRST: self.longest_first,
            VictimPolicy.SHORTEST_FIRST: self._by_length.ascending,
            VictimPolicy.OLDEST_FIRST: lambda: iter(self.members),
            VictimPolicy.NEWEST_FIRST: lambda: reversed(self.members),
        }
        return orders[self._policy]()


class VictimController(Controller):
    """A controller with ``OrderedBatch``."""

    def __init__(self, config: ControllerConfig, policy: VictimPolicy) -> None:
        self._policy = policy
        super().__init__(config)

    def _begin(self, config: ControllerConfig) -> None:
        super()._begin(config)
        self._rotation.batches = tuple(OrderedBatch(self._policy) for _ in self._rotation.batches)


class VictimSystem(PipeMaxSystem):
    """The simulation of an order of eviction."""

    def __init__(self, scenario: Scenario, options: PipeMaxOptions, *, policy: VictimPolicy) -> None:
        self._policy = policy
        super().__init__(scenario, options)

    def make_controller(self, config: ControllerConfig) -> Controller:
        return VictimController(config, self._policy)


class LayerFirstSystem(PipeMaxSystem):
    """A block lies in a piece for each layer."""

    def pieces_of_layers(self, num_layers: int) -> int:
        return num_layers


class _EqualPriority(Machine):
    def send_s(self, stage: int, activation_bytes: float) -> float:
        queued_s = self.links.queued_s(self.gpus_of(stage)[0], Direction.HOST_TO_GPU)
        return super().send_s(stage, activation_bytes) + queued_s


class NoActivationPrioritySystem(PipeMaxSystem):
    """Activations wait for the copies that were queued before them."""

    machine_class = _EqualPriority
