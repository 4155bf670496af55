"""What the command line changes about a policy's benchmark."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginegate.candidate import Candidate
from enginegate.errors import InputError
from enginegate.loadgen.schedule import load_pattern
from enginegate.measurement import ClosedLoad, Driver, Load
from enginegate.policy import Policy, parse_policy, read_policy


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    """What the command line changes about a policy; None leaves the policy's own."""

    load: str | None = None
    rate: float | None = None
    seconds: float | None = None
    driver: Driver | None = None

    @property
    def clients(self) -> int | None:
        """Of a closed loop; None for an open one."""
        found = re.fullmatch(r"closed:([1-9]\d{0,4})", self.load or "")
        return int(found[1]) if found else None

    def rules(self, policy: Path) -> Policy:
        """The policy with these changes, checked like one that was written so.

        Raises:
            InputError: the load is none, or the policy does not allow the values.
        """
        rules = read_policy(policy)
        raw: dict[str, Any] = rules.model_dump()
        if self.load is not None and self.clients is None:
            raw["load"]["arrivals"] = self.load

        if self.driver is not None:
            raw["load"]["driver"] = self.driver
        if self.seconds is not None:
            raw["search"]["measurement_s"] = self.seconds
        if self.rate is not None:
            raw["search"] |= {"min_rate_per_s": self.rate, "max_rate_per_s": self.rate}
            if rules.search.at_rate_per_s is not None:
                raw["search"]["at_rate_per_s"] = self.rate
        changed = parse_policy(raw, f"{policy} with the command's options")
        try:
            load_pattern(changed.load.arrivals)
        except InputError as error:
            raise InputError(
                f"{error}\nA pattern is an open loop (on a schedule); closed:N is N clients, each "
                "waiting for its answer."
            ) from error
        return changed

    def one_load(self, rules: Policy) -> Load | ClosedLoad:
        """The load of a single measurement."""
        search = rules.search
        if self.clients is not None:
            return ClosedLoad(
                clients=self.clients, duration_s=search.measurement_s, seed=search.seed
            )
        rate = self.rate or rules.slo.min_throughput_per_s
        return Load(
            rate_per_s=rate,
            duration_s=search.measurement_s,
            seed=search.seed,
            arrivals=rules.load.arrivals,
        )


def wanted(rules: Policy, names: list[str]) -> tuple[Candidate, ...]:
    """The policy's candidates of those names; all of them when none is given.

    Raises:
        InputError: a name is not one of them; lists those there are.
    """
    there = {candidate.name: candidate for candidate in rules.candidates.all()}
    unknown = [name for name in names if name not in there]
    if unknown:
        raise InputError(
            f"The policy has no candidate {', '.join(map(repr, unknown))}.\n"
            f"It has: {', '.join(there)}. Add others under [candidates]."
        )
    return tuple(there[name] for name in dict.fromkeys(names or there))
