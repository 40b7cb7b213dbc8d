"""Policy: the base class of all policies, their registry, and PolicyGuard, through which the scheduler calls one.

To add a policy, subclass Policy, give a name and a key, and register it.
Owns: the protocol between scheduler and policy, the registry, the checks of a policy's answers, and its error count.
Does not: find plug-ins (octavo.plugins), or check budgets, blocks or progress (the scheduler does).
Invariants: whatever a policy answers or raises, the scheduler gets plain tuples of floats (no NaN) and plain strings,
and no exception. A bad answer is replaced by a default and counted. Preemptions cannot go on forever: there is always a
running request that is never preempted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from octavo.core.limits import Limits
from octavo.core.request_state import MAX_RETURNS, Rank, RequestState
from octavo.errors import ConfigError


class Policy:
    """Orders requests and chooses victims. The lowest key is served first; equal keys are served by arrival.

    `headroom` is the default share of the pool kept free at admission. With `skip_ahead`, a step considers up to 64
    requests after one that lacks room. With `preempt_on_arrival`, a waiting request that lacks room may preempt running
    requests of later victim rank. With `lookahead` > 1, the first `lookahead` waiting requests are admitted in the
    order of `prefer`. With `tracks_service`, the scheduler calls `served`. The scheduler reads these attributes once,
    after `configure`. `rule` describes the order in a few words.
    A policy reads the public fields of RequestState and must not write to them. An exception counts as no answer.
    """

    name = ""
    headroom = 0.01
    skip_ahead = False
    preempt_on_arrival = False
    lookahead = 1
    tracks_service = False
    rule = ""

    def configure(self, limits: Limits) -> None:
        """Read the limits. Called once, before any other method."""

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return the key in the order of service: the lowest is served first.

        Called when a request arrives, is admitted, starts or stops decoding, or is preempted.
        """
        return ()

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """Return the key in the order of preemption: the greatest is preempted first, then the latest arrival."""
        return ()

    def lane(self, request: RequestState) -> str:
        """Return the name of the request's waiting line. Called once per request; by default there is one line."""
        return ""

    def lane_key(self, lane: str) -> float:
        """Return a line's key: the line with the lowest key is first.

        Called for each candidate. The key may only grow while requests wait in the line.
        """
        return 0.0

    def why(self, request: RequestState) -> str:
        """Explain a request's position in a text with numbers, which must not name other requests or tenants."""
        return ""

    def prefer(self, request: RequestState, cached_tokens: int) -> tuple[float, ...]:
        """Return the key among the first `lookahead` candidates: the lowest is admitted first.

        `cached_tokens` is the length of the request's cached prefix.
        """
        return ()

    def arrived(self, request: RequestState) -> None:
        """Handle a request that was submitted and waits."""

    def admitted(self, request: RequestState, num_tokens: int) -> None:
        """Handle a request that starts or resumes; `num_tokens` of its known tokens must be computed."""

    def preempted(self, request: RequestState) -> None:
        """Handle a request that was preempted and waits again."""

    def finished(self, request: RequestState) -> None:
        """Handle a running or waiting request that ended."""

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Handle `num_tokens` output tokens that were committed for a request."""

    def save(self) -> Any:
        """Return what the policy remembers as numbers, texts, lists, and dicts by text, for `restore`.

        By default these are its attributes. A policy whose attributes are anything else overrides both methods, or a
        recording cannot begin while it runs.
        """
        return _copied(getattr(self, "__dict__", {}))

    def restore(self, saved: Any, requests: Mapping[int, RequestState]) -> None:
        """Take over what `save` returned, in a configured policy; `requests` are the open ones by order of arrival."""
        self.__dict__.update(saved)


def _copied(value: Any) -> Any:
    """Return a copy of plain data. Raises TypeError for anything else."""
    if type(value) is list:
        return [_copied(each) for each in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _copied(each) for key, each in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{type(value).__name__} is no plain data")


POLICIES: dict[str, type[Policy]] = {}


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Register a policy under its name; usable as a decorator. Raises ConfigError if the name is bad or in use."""
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ConfigError(f"{policy!r} is no policy; give a subclass of octavo.Policy")
    name: object = policy.name
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"policy {policy!r} has the name {name!r}; give it a name of letters, digits and _")
    if POLICIES.setdefault(name, policy) is not policy:
        raise ConfigError(f"policy {name!r} is registered already, by {POLICIES[name]!r}; choose another name")
    return policy


def find_policy(name: str) -> type[Policy]:
    """Return the registered policy of that name. Raises ConfigError with the known names."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; give one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


# --- the guard ----------------------------------------------------------------------------------------------

_HOOKS = (
    "key", "victim_key", "lane", "lane_key", "prefer", "arrived", "admitted", "preempted", "finished", "served",
)  # fmt: skip


def _shown(value: object) -> str:
    """Return a text for a user's object; its own __str__ may fail."""
    try:
        return str(value)[:200]
    except Exception:
        return f"<{type(value).__name__}>"


def _is_inherited(policy: Policy, hook: str) -> bool:
    """Return True if the policy does not override this hook, whose default does nothing."""
    try:
        return getattr(getattr(policy, hook), "__func__", None) is getattr(Policy, hook)
    except Exception:  # a user's code; calling the hook will fail too and be counted
        return False


class PolicyGuard:
    """Calls one policy and checks its answers. Reads its attributes once; raises ConfigError if one is bad.

    Under a policy's own order two requests could preempt each other forever. So a request that was preempted
    MAX_RETURNS times becomes a victim only after all other requests, and of several such requests the latest arrival is
    preempted first. The earliest arrival among them is never preempted again, and finishes.
    """

    __slots__ = (
        "_hooks", "first_error", "headroom", "lookahead", "num_errors", "policy", "preempt_on_arrival",
        "skip_ahead", "tracks_service",
    )  # fmt: skip

    def __init__(self, policy: Policy) -> None:
        headroom, lookahead = policy.headroom, policy.lookahead
        if not (isinstance(headroom, (int, float)) and 0 <= headroom < 1):
            raise ConfigError(f"headroom is {headroom!r}; give a share of the pool from 0 up to, but not, 1")
        if not (isinstance(lookahead, int) and lookahead >= 1):
            raise ConfigError(f"lookahead is {lookahead!r}; give a number of candidates of at least 1")
        self.policy = policy
        self.headroom = float(headroom)
        self.lookahead = int(lookahead)
        self.skip_ahead = bool(policy.skip_ahead)
        self.preempt_on_arrival = bool(policy.preempt_on_arrival)
        self.tracks_service = bool(policy.tracks_service)
        self._hooks = frozenset([hook for hook in _HOOKS if not _is_inherited(policy, hook)])  # only these are called
        self.num_errors = 0
        self.first_error = ""

    def rank(self, request: RequestState) -> Rank:
        """Return the request's rank in the order of service: the policy's key, then the order of arrival."""
        return self._key("key", request) if "key" in self._hooks else (), request.order

    def victim_rank(self, request: RequestState) -> Rank:
        """Return the request's rank in the order of preemption; the greatest is preempted first."""
        if request.num_preemptions >= MAX_RETURNS:
            return (0.0,), request.order
        if "victim_key" not in self._hooks:
            return (1.0,), request.order
        return (1.0, *self._key("victim_key", request)), request.order

    def preference(self, request: RequestState, cached_tokens: int) -> Rank:
        """Return the request's rank among the candidates whose cached prefix is known."""
        return self._key("prefer", request, cached_tokens), request.order

    def lane(self, request: RequestState) -> str:
        """Return the name of the request's waiting line. Call once per request: a policy's answer may change."""
        if "lane" not in self._hooks:
            return ""
        try:
            lane: object = self.policy.lane(request)
            if isinstance(lane, str):
                return str.__str__(lane)  # a plain string, even if the answer is of a subclass
            self._count(f"lane gave {_shown(lane)}")
        except Exception as error:  # a user's code; the default line is used
            self._count(f"lane: {type(error).__name__}: {_shown(error)}")
        return ""

    def lane_key(self, lane: str) -> float:
        """Return a line's key; 0.0 if the policy's answer is not a number."""
        if "lane_key" not in self._hooks:
            return 0.0
        try:
            key = float(self.policy.lane_key(lane))
            if key == key:
                return key
            self._count("lane_key gave NaN")
        except Exception as error:
            self._count(f"lane_key: {type(error).__name__}: {_shown(error)}")
        return 0.0

    def notify(self, hook: str, *args: Any) -> None:
        """Call the policy's hook of that name."""
        if hook not in self._hooks:
            return
        try:
            getattr(self.policy, hook)(*args)
        except Exception as error:
            self._count(f"{hook}: {type(error).__name__}: {_shown(error)}")

    def notify_served(self, requests: Iterable[RequestState]) -> None:
        """Notify the policy of one token of each request, in order, as `notify` does: a call of its own per token."""
        policy = self.policy
        for request in requests if "served" in self._hooks else ():
            try:
                policy.served(request, 1)
            except Exception as error:
                self._count(f"served: {type(error).__name__}: {_shown(error)}")

    def save(self) -> Any:
        """Return the policy's state as plain data. Raises ConfigError if the policy cannot give it."""
        try:
            return self.policy.save()
        except Exception as error:  # a user's code
            raise ConfigError(
                f"the state of policy {self.policy.name!r} cannot be saved ({type(error).__name__}: {_shown(error)}); "
                "give it the methods save and restore"
            ) from None

    def restore(self, saved: Any, requests: Mapping[int, RequestState]) -> None:
        """Give the policy its state. Raises ConfigError."""
        try:
            self.policy.restore(saved, requests)
        except Exception as error:  # a user's code
            raise ConfigError(f"policy {self.policy.name!r} does not take its state: {_shown(error)}") from error

    def rule(self) -> str:
        """Return the order of service as a text for people. A failure here is not counted."""
        return self._text(lambda: self.policy.rule) or "as the policy ranks them"

    def why(self, request: RequestState) -> str:
        """Return the policy's explanation of a request's position, for people. A failure here is not counted."""
        return self._text(lambda: self.policy.why(request))

    @staticmethod
    def _text(read: Callable[[], object]) -> str:
        try:
            text = read()
            return str.__str__(text)[:200] if isinstance(text, str) else ""
        except Exception:  # a user's code
            return ""

    def _key(self, name: str, *args: Any) -> tuple[float, ...]:
        try:
            given = getattr(self.policy, name)(*args)
            if isinstance(given, tuple):
                parts = list(given)
                key = tuple([float(part) for part in parts if isinstance(part, (int, float))])
                if len(key) == len(parts) and all([part == part for part in key]):  # no NaN
                    return key
            self._count(f"{name} gave {_shown(given)}")
        except Exception as error:
            self._count(f"{name}: {type(error).__name__}: {_shown(error)}")
        return ()

    def _count(self, message: str) -> None:
        self.num_errors += 1
        self.first_error = self.first_error or message


def create_policy(name: str, limits: Limits) -> Policy:
    """Create and configure the policy of that name. Raises ConfigError if no policy has the name, or it fails."""
    kind = find_policy(name)
    try:
        policy = kind()
        policy.configure(limits)
        PolicyGuard(policy)  # checks its attributes
    except Exception as error:  # a user's code
        raise ConfigError(f"policy {name!r} does not start: {type(error).__name__}: {_shown(error)}") from error
    return policy
