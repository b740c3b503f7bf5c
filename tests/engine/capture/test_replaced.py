"""Functions that are replaced, rest, and serve again below another one."""

from __future__ import annotations

from trainprobe.engine.capture.patching.replaced import Replaced


class Owner:
    """Has one function."""

    @staticmethod
    def work() -> list[str]:
        """Tell who was called."""
        return ["original"]


def over(name):
    """Replace the function by one that tells its name first, unless it rests."""
    original = Owner.work

    def ours():
        return original() if ours.ended else [name, *original()]

    return Replaced(Owner, "work", ours)


def test_what_rests_below_another_one_serves_again_in_its_old_place_and_leaves_with_it():
    untouched = Owner.__dict__["work"]
    lower, upper = over("lower"), over("upper")
    for _ in range(3):
        lower.back()
        assert Owner.work() == ["upper", "original"]
        assert lower.wake()
        assert Owner.work() == ["upper", "lower", "original"]
    lower.back()
    upper.back()
    assert Owner.work() == ["original"]
    assert not lower.wake()
    setattr(Owner, "work", untouched)  # noqa: B010
