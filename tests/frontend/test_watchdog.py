"""The watchdog: overdue beats and silence accuse, its own lateness does not."""

import pytest

from octavo.engine.heartbeat import Beat, Phase
from octavo.frontend.engine_process import ANSWER_S, LATE_S, LOOK_S, Watchdog


def beat(number: int = 1, deadline: float | None = None) -> Beat:
    return Beat(number, 1, Phase.IDLE if deadline is None else Phase.STEP, 7, number, deadline, 1)


def found_at(watchdog: Watchdog, until: float, last: Beat, oldest_call_at: float | None = None) -> float | None:
    """When the watchdog complains, looking as often as it should."""
    now = 0.0
    while now < until:
        now += LOOK_S
        if watchdog.look(now, last, oldest_call_at) is not None:
            return now
    return None


def test_a_step_over_its_deadline_is_found_soon_after() -> None:
    assert found_at(Watchdog(0.0), 60.0, beat(deadline=5.0)) == pytest.approx(5.4, abs=0.15)


def test_idling_is_no_stall_unless_something_was_asked() -> None:
    assert found_at(Watchdog(0.0), 3600.0, beat()) is None
    assert found_at(Watchdog(0.0), 60.0, beat(), oldest_call_at=10.0) == pytest.approx(10.0 + ANSWER_S, abs=0.2)
    assert found_at(Watchdog(0.0), 60.0, beat(deadline=50.0), oldest_call_at=10.0) == pytest.approx(50.4, abs=0.2)


def test_a_question_waits_as_long_as_beats_come() -> None:
    watchdog = Watchdog(0.0)
    for tick in range(1, 1000):
        assert watchdog.look(tick * LOOK_S, beat(number=tick // 40), 1.0) is None


def test_new_beats_clear_the_suspicion() -> None:
    watchdog = Watchdog(0.0)
    for tick in range(1, 500):
        now = tick * LOOK_S
        assert watchdog.look(now, beat(number=tick, deadline=now - 1.0), None) is None


def test_who_is_late_itself_accuses_nobody() -> None:
    """The machine stood still, this side with it: the engine gets as long again to move."""
    watchdog = Watchdog(0.0)
    assert watchdog.look(0.1, beat(deadline=5.0), None) is None
    for step in range(1, 50):
        assert watchdog.look(0.1 + step * 2 * LATE_S, beat(deadline=5.0), 0.0) is None


def test_an_engine_without_a_beat_must_answer_too() -> None:
    watchdog = Watchdog(0.0)
    looks = [watchdog.look(tick * LOOK_S, None, 0.0) for tick in range(1, 80)]
    assert looks[40] is None and looks[-1] is not None
