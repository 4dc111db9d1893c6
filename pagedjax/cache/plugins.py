"""Plug-ins: from what a setting names to what builds it, whether it is part of pagedjax or comes from outside.

A setting names a policy, an index (or any other kind) in one of four ways, the same in Python, a TOML file, on
the command line and in a worker process:

* a built-in name: "lru";
* a name that an installed package declares as an entry point, in its pyproject.toml:
  `[project.entry-points."pagedjax.policies"]` with `mru = "mru_policy:MRU"`;
* "module:Class", whatever can be imported: "mru_policy:MRU";
* in Python, the class or any factory itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

Factory = TypeVar("Factory", bound=Callable[..., Any])


@dataclass(frozen=True)
class Plugins(Generic[Factory]):
    """All plug-ins of one kind.

    Attributes:
        setting: What the kind is called in settings and messages: "policy".
        group: Entry-point group: "pagedjax.policies".
        built_in: Name to factory. These names win; "module:Class" reaches a plug-in whatever its name.
        common: The name that messages recommend.

    Example:
        >>> kind = Plugins("number", "pagedjax.numbers", {"int": int, "float": float}, "int")
        >>> kind.find("float")("2"), kind.find("fractions:Fraction")(1, 2)
        (2.0, Fraction(1, 2))
    """

    setting: str
    group: str
    built_in: Mapping[str, Factory]
    common: str

    def names(self) -> list[str]:
        """Every name that `find` knows: the built-in ones in their order, then those of installed packages."""
        installed = {point.name for point in entry_points(group=self.group)}
        return [*self.built_in, *sorted(installed - self.built_in.keys())]

    def find(self, named: str | Factory) -> Factory:
        """The factory that a setting names.

        Raises:
            ValueError: No such name, module or member, or it cannot be called.
        """
        if not isinstance(named, str):
            if not callable(named):
                raise ValueError(f"{self.setting}={named!r}: must be a name or a factory; try {self.common}")
            return named
        if named in self.built_in:
            return self.built_in[named]
        if ":" in named:
            return self._imported(named)
        for point in entry_points(group=self.group, name=named):
            return self._checked(named, point.load())
        raise ValueError(
            f"{self.setting}={named}: must be one of {', '.join(self.names())}, or module:name; "
            f"try {self.common}"
        )

    def make(self, named: str | Factory, *args: Any, hooks: tuple[str, ...] = ()) -> Any:
        """What the named factory makes of `args`; a class must have the `hooks`.

        Raises:
            ValueError: As `find`, or it is a class of another kind, or takes other arguments.
        """
        factory = self.find(named)
        if isinstance(factory, type) and (missing := [hook for hook in hooks if not hasattr(factory, hook)]):
            raise ValueError(f"{self.setting}={named}: is no {self.setting}; it lacks {', '.join(missing)}")
        try:
            signature = inspect.signature(factory)
        except ValueError:  # of some built-in types nobody knows it
            return factory(*args)
        try:
            signature.bind(*args)
        except TypeError as error:
            rule = f"must be made of {len(args)} number{'s' * (len(args) > 1)} ({error})"
            raise ValueError(f"{self.setting}={named}: {rule}; see docs/plugins.md") from None
        return factory(*args)

    def _imported(self, named: str) -> Factory:
        module, _, path = named.partition(":")
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there; what it imports is not
            raise ValueError(
                f"{self.setting}={named}: there is no module {error.name}; install it or put its folder on PYTHONPATH"
            ) from None
        except ValueError as error:  # an empty or relative module name
            raise ValueError(f"{self.setting}={named}: must be module:Class ({error})") from None
        for name in path.split("."):
            if not hasattr(found, name):
                raise ValueError(f"{self.setting}={named}: {module} has no {path}; look for the class's name")
            found = getattr(found, name)
        return self._checked(named, found)

    def _checked(self, named: str, found: Any) -> Factory:
        if not callable(found):
            raise ValueError(f"{self.setting}={named}: is no class or factory but {type(found).__name__}")
        factory: Factory = found
        return factory
