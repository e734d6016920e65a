"""What a user can say about a network of unknown layers, and how a doubt shows what to say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from shlex import quote
from typing import Literal

from ckptbridge.errors import CoverageError, UsageError
from ckptbridge.tables.messages import nearest

# Each takes module paths (globs, separated by commas), or ``none``. A module's path is a tensor's name without the last
# component, ``.`` is the network itself. What is given is complete: no other module is of that kind.
OPTIONS: Mapping[str, str] = {
    "embedding": "matrices without a bias that are embeddings; the others are dense layers",
    "norm": "vectors without a bias that are a norm's weight",
    "prelu": "vectors without a bias that are a PReLU's slope",
    "conv1d": "one-dimensional convolutions; MindSpore keeps their kernels with a height of 1",
    "batch_norm_3d": "batch norms over three dimensions, which MindSpore puts into a component bn2d",
    "keep": "modules of other kinds, whose tensors keep name and shape",
}
NONE = "none"
_SHOWN = 200  # modules written out in one line of a remedy


@dataclass(frozen=True)
class Options:
    """The user's options: globs by option."""

    globs: Mapping[str, tuple[str, ...]]

    @classmethod
    def parse(cls, given: Mapping[str, str], paths: Sequence[str]) -> Options:
        """Raises UsageError for an unknown option, and for a glob that no module's path matches."""
        globs: dict[str, tuple[str, ...]] = {}
        known = [path or "." for path in paths]
        # In a MindSpore checkpoint a norm over three dimensions is one component longer.
        known += [path.removesuffix(".bn2d") for path in paths if path.endswith(".bn2d")]
        for name, value in given.items():
            if name not in OPTIONS:
                raise UsageError(
                    f"There is no layout option '{name}' for networks of mindspore.nn layers.",
                    option=f"--layout {name}={value}",
                    remedy=f"{nearest(name, OPTIONS)} Options: {', '.join(OPTIONS)}.",
                )
            globs[name] = tuple(part.strip() for part in value.split(",") if part.strip() not in ("", NONE))
            for glob in globs[name]:
                if not any(fnmatchcase(path, glob) for path in known):
                    raise UsageError(
                        f"No module of the checkpoint is called '{glob}'.",
                        option=f"--layout {name}={value}",
                        remedy=nearest(glob, known),
                    )
        return cls(globs)

    def given(self, option: str) -> bool:
        """Whether the user said anything about it, ``none`` included."""
        return option in self.globs

    def has(self, option: str, path: str) -> bool:
        """Whether the module belongs to the option."""
        return any(fnmatchcase(path or ".", glob) for glob in self.globs.get(option, ()))

    def spells(self, option: str, path: str) -> bool:
        """Whether the module is named there letter by letter."""
        return escape(path or ".") in self.globs.get(option, ())


def listed(paths: Iterable[str]) -> str:
    """An option's value that names these modules, and no other."""
    return ",".join(escape(path or ".") for path in paths) or NONE


Kind = Literal[
    "matrix",
    "vector",
    "batch norm",
    "weight norm",
    "contradiction",
    "bn2d",
    "slope",
    "flat kernel",
    "no return",
]


@dataclass(frozen=True)
class Doubt:
    """A module that can be read in two ways; ``about`` names the options that contradict it."""

    kind: Kind
    path: str
    about: str = ""


# What is seen, and the options that settle it.
_MEANINGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "matrix": ("a matrix without a bias is an embedding or a dense layer", ("embedding",)),
    "vector": ("a vector without a bias is a norm's weight, a PReLU's slope, or neither", ("norm", "prelu", "keep")),
    "batch norm": ("in a network with 3-D convolutions a batch norm has two or three dimensions", ("batch_norm_3d",)),
    "weight norm": ("a weight split into weight_g and weight_v has no counterpart in mindspore.nn", ("keep",)),
    "bn2d": ("bn2d is a batch norm over three dimensions, or a module of that name", ("batch_norm_3d",)),
    "slope": ("a vector w is a PReLU's slope, or a parameter of that name", ("prelu", "keep")),
    "flat kernel": ("a kernel of height 1 is a one- or a two-dimensional convolution", ("conv1d",)),
    "no return": ("these have names of the other framework's layers, and would come back under others", ("keep",)),
}


def refuse(doubts: Sequence[Doubt], side: str) -> None:
    """Raise CoverageError with every doubt and the options to paste; nothing when there is none."""
    if not doubts:
        return
    for doubt in doubts:
        if doubt.kind == "contradiction":
            raise UsageError(
                f"'{doubt.path or '.'}' cannot be what --layout {doubt.about} says: its tensors have other shapes.",
                remedy="Take the module out of that option.",
            )
    lines = []
    for kind, (meaning, options) in _MEANINGS.items():
        paths = list(dict.fromkeys(doubt.path for doubt in doubts if doubt.kind == kind))
        if not paths:
            continue
        value = listed(paths[:_SHOWN])
        lines.append(f"# {meaning}:")
        lines += [f"--layout {quote(f'{option}={value}')}" for option in options]
        if options in (("embedding",), ("conv1d",), ("batch_norm_3d",)):
            lines.append(f"--layout {options[0]}={NONE}")
        if kind == "weight norm":
            lines.append("# or fold it before: torch.nn.utils.remove_weight_norm")
        if len(paths) > _SHOWN:
            lines.append(f"# and {len(paths) - _SHOWN} more")
    number = len({doubt.path for doubt in doubts})
    raise CoverageError(
        f"{number} module{'s' if number > 1 else ''} can be read in more than one way, because a checkpoint "
        "does not say which layers it holds.",
        side=side,
        modules=", ".join(sorted({doubt.path or "." for doubt in doubts})[:8]),
        remedy="Say what they are; of each group keep the line, or the part of it, that is true.\n" + "\n".join(lines),
    )
