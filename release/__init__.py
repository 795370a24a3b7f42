"""From a checkpoint to a repository that can be published: every file made, verified, measured and described."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from release.recipe import Recipe
    from release.report import DryRun, ReleaseReport

__all__ = ["release"]


def release(model: str | Path, out: str | Path, recipe: Recipe | None = None, **options: Any) -> ReleaseReport | DryRun:
    """Make a release of a model folder or Hub id below the folder `out`.

    recipe: `release.recipe.preset` and `read_recipe` make them; None for the preset "standard". options: those of
    `release.run.release`. Raises ToolError.
    """
    from release.recipe import DEFAULT_PRESET, preset
    from release.run import release as run

    return run(model, Path(out), recipe or preset(DEFAULT_PRESET), **options)
