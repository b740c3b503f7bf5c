"""Holds two packs against each other: one file a check, and one that puts the answer into a sentence."""

from __future__ import annotations

from trainprobe.config_check.compare.dataset import compare_dataset
from trainprobe.config_check.compare.environment import compare_environment
from trainprobe.config_check.compare.frameworks import across, as_notes, framework_of, in_common_words
from trainprobe.config_check.compare.headline import headline
from trainprobe.config_check.compare.hyperparameters import compare_hyperparameters
from trainprobe.config_check.compare.packages import compare_packages
from trainprobe.config_check.compare.randomness import compare_randomness
from trainprobe.config_check.compare.verdicts import Check, PackComparison, PackFinding
from trainprobe.config_check.compare.weights import compare_weights
from trainprobe.config_check.pack import Pack
from trainprobe.engine.core.words import numbered
from trainprobe.errors import CompareError, FormatError

CHECKS = (compare_environment, compare_packages, compare_hyperparameters, compare_dataset, compare_weights, compare_randomness)


def compare_packs(bench: Pack, cmp: Pack) -> PackComparison:
    """Compare two packs; raises CompareError where their content is not what a pack holds."""
    frameworks = framework_of(bench), framework_of(cmp)
    lacking: tuple[str, ...] = ()
    try:
        if len(set(frameworks)) > 1:
            left, right, lacking = in_common_words(bench, cmp)
            checks = [as_notes(compare(left, right)) for compare in CHECKS]
        else:
            checks = [compare(bench, cmp) for compare in CHECKS]
    except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
        if isinstance(error, FormatError):
            raise
        raise CompareError(
            f"{bench.path} and {cmp.path}: a member does not have the content that a pack has, so it was edited or damaged"
            f" ({type(error).__name__}: {error})"
        ) from error
    incomplete = _incomplete(bench, cmp)
    if incomplete:
        checks[0] = Check(
            checks[0].name, checks[0].columns, checks[0].rows, (*checks[0].findings, *incomplete), checks[0].compared
        )
    sentence, consequences = headline(checks)
    notes = (across(*frameworks), *lacking, *_notes(bench, cmp)) if len(set(frameworks)) > 1 else _notes(bench, cmp)
    return PackComparison(bench.path, cmp.path, tuple(checks), sentence, consequences, notes)


def _incomplete(bench: Pack, cmp: Pack) -> list[PackFinding]:
    """Say what of a job is not in its pack at all."""
    found: list[PackFinding] = []
    for side, pack in (("bench", bench), ("cmp", cmp)):
        if missing := pack.missing_ranks():
            found.append(
                PackFinding(
                    "error",
                    f"{side} lacks {numbered('rank', missing)} of {pack.world_size}",
                    "missing",
                )
            )
        elif not pack.complete:
            found.append(PackFinding("warning", f"{side} is the pack of a run that ended early", "missing end"))
    return found


def _notes(bench: Pack, cmp: Pack) -> tuple[str, ...]:
    notes = [f"{side}: {note}" for side, pack in (("bench", bench), ("cmp", cmp)) for note in pack.notes]
    if bench.world_size != cmp.world_size:
        notes.append(f"bench ran on {bench.world_size} and cmp on {cmp.world_size} ranks; ranks that both have were compared")
    notes += [
        f"{side}: read from a pack of {pack.origin}"
        for side, pack in (("bench", bench), ("cmp", cmp))
        if pack.origin != "trainprobe"
    ]
    return tuple(notes)
