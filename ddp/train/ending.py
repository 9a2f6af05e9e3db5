"""Says how a run may not end, for settings and for the arguments of `ddp.fit` alike."""

from __future__ import annotations

from collections.abc import Iterator


def ending_problems(
    *, trial: str, resumes: str, stops_early: str, is_evaluated_meanwhile: bool, remedy: str
) -> Iterator[str]:
    """Yields what is wrong, a sentence each.

    Args:
        trial, resumes, stops_early: what asks for these three, as the user has written it; "" for nothing.
        remedy: how to ask for evaluations.
    """
    if trial and resumes:
        yield f"{trial}: with {resumes}; a trial begins anew, so leave one out"
    if stops_early and not is_evaluated_meanwhile:
        yield f"{stops_early}: goes by evaluations, of which there is one, at the end; {remedy}"
