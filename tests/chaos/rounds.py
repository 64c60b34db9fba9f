"""What happens in a round, drawn from its seed alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.faults import Fault, faults_of

WORLDS = ("gloo:2", "mpirun:2", "elastic:2")
"""Controller and number of ranks: elastic is horovodrun with a host discovery script."""
FIRST_STEP, LAST_STEP = 3, 90
"""Steps at which a fault may strike, of 100 (script) or 138 (command)."""
LAST_BEFORE_CHANGE = 60
"""The last at which hosts change: it takes horovodrun a second or two to look at them again."""


@dataclass(frozen=True)
class Round:
    """One training that is struck, and goes on."""

    seed: int
    world: str
    """Controller and number of ranks: gloo:2, mpirun:2, elastic:2."""
    fault: str
    form: str
    rank: int
    """The rank that is struck, or whose host or disk is."""
    step: int
    delay: float
    """Seconds from the beginning of the step to the fault."""
    variant: int
    """Which of the ways to do it: how a checkpoint is damaged, whether a disk is freed again or a host is spare."""

    @property
    def controller(self) -> str:
        return self.world.partition(":")[0]

    @property
    def size(self) -> int:
        return int(self.world.partition(":")[2])

    @property
    def expected(self) -> Fault:
        """What has to become of it."""
        return faults_of(self.world)[self.fault]

    @property
    def command(self) -> str:
        """The command that does this round again."""
        return f"python -m tests.chaos --rounds 1 --seed {self.seed} --faults {self.fault} --worlds {self.world}"

    @property
    def name(self) -> str:
        return f"seed {self.seed}, {self.fault} on rank {self.rank} at step {self.step}, {self.form} in {self.world}"


def draw(seed: int, faults: Sequence[str], worlds: Sequence[str]) -> Round:
    """Return the round of this seed; what is drawn depends on nothing else, but for fault and world on the choice."""

    def of(what: str) -> random.Random:
        return random.Random(f"{seed} {what}")

    fault = of("fault").choice(list(faults))
    world = of("world").choice([world for world in worlds if fault in faults_of(world)])
    last = LAST_BEFORE_CHANGE if fault.startswith("host-") else LAST_STEP
    return Round(
        seed=seed,
        world=world,
        fault=fault,
        form=of("form").choice(faults_of(world)[fault].forms),
        rank=of("rank").randrange(int(world.partition(":")[2])),
        step=of("step").randint(FIRST_STEP, last),
        delay=round(of("delay").uniform(0.0, 0.02), 4),
        variant=of("variant").randrange(1000),
    )
