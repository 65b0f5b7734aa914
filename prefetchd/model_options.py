"""Which model on which device: the options shared by every command that traces all a model can launch.

`@model_options` adds them and hands them to the command as one `choice`, so that commands cannot drift apart
in what they accept or in what an omitted option means.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from prefetchd.config import MOST_TOKENS, Settings
from prefetchd.profiles import Profile, profile_from_config, read_profile
from prefetchd.targets import Target, TargetError, load_target, preset_names, probe_target

Result = TypeVar("Result")

OPTIONS = (
    click.option(
        "--target",
        help=f"Device to compile for: {', '.join(preset_names())}, or a TOML file. "
        "Default: this machine's GPU.",
    ),
    click.option(
        "--model",
        type=click.Path(path_type=Path, exists=True),
        help="A model's config.json, or the directory that holds it.",
    ),
    click.option(
        "--profile", type=click.Path(path_type=Path, exists=True), help="A .profile.toml instead of --model."
    ),
    click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel size."),
    click.option("--ep", type=click.IntRange(1), default=1, show_default=True, help="Expert parallel size."),
    click.option("--dp", type=click.IntRange(1), default=1, show_default=True, help="Data parallel size."),
    click.option(
        "--quantization", help="fp8 or bf16, where the configuration does not say what the engine runs."
    ),
    click.option(
        "--context-tokens",
        type=click.IntRange(1),
        help="Tokens of cached context one MLA prefill step may expand.",
    ),
    click.option(
        "--max-tokens",
        type=click.IntRange(1, MOST_TOKENS),
        help="Largest batch of the scheduler, in tokens. Default: 8192.",
    ),
    click.option(
        "--provider",
        "providers",
        multiple=True,
        help="Kernel family; may be repeated. Default: all installed.",
    ),
)


class ModelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What the user chose, as given."""

    target: str | None
    model: Path | None
    profile: Path | None
    tp: int
    ep: int
    dp: int
    quantization: str | None
    context_tokens: int | None
    max_tokens: int | None
    providers: tuple[str, ...]

    def sites(self) -> Profile:
        """The profile. Raises `ProfileError`, and `UsageError` unless one of the two ways is given."""
        if (self.model is None) == (self.profile is None):
            raise click.UsageError("give one of --model config.json and --profile FILE.profile.toml")
        if self.profile is not None:
            return read_profile(self.profile)
        assert self.model is not None
        return profile_from_config(
            self.model,
            tp=self.tp,
            ep=self.ep,
            dp=self.dp,
            quantization=self.quantization,
            context_tokens=self.context_tokens,
        )

    def device(self, settings: Settings) -> tuple[str, Target]:
        """The target with its name: the option's, the settings', this machine's. Raises `TargetError`."""
        return named_target(self.target or settings.target)


def model_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Adds the options; the command gets them as the keyword `choice`."""

    @wraps(command)
    def wrapped(**options: Any) -> Result:
        chosen = {name: options.pop(name) for name in ModelChoice.__struct_fields__}
        return command(choice=ModelChoice(**chosen), **options)

    for option in reversed(OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def named_target(name: str | None) -> tuple[str, Target]:
    """The target of this name; without one, this machine's device. Raises `TargetError`."""
    if name is not None:
        return name, load_target(name)
    try:
        target = probe_target()
    except TargetError as error:
        # Its advice to name a target is ours below, with the names.
        reason = str(error).partition("; name a preset")[0]
        raise TargetError(
            f"no --target given and no GPU to ask: {reason}; name one of {', '.join(preset_names())}, "
            "or a TOML file"
        ) from error
    return target.name, target
