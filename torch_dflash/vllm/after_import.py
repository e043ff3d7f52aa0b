"""Changing a module of others as soon as it has been imported, and not importing it for that."""

import importlib.abc
import importlib.machinery
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class AfterImport(importlib.abc.MetaPathFinder):
    """For sys.meta_path. Finds nothing of its own; `changes`: name of a module -> what is done to it when it has been
    executed."""

    changes: Mapping[str, Callable[[ModuleType], None]]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.changes else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self.changes[name](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec
