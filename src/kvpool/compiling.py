"""What mypyc is told about a class where it compiles it, and nothing where Python runs it. See docs/decisions/0006."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:  # mypy_extensions comes with mypy: whoever runs kvpool need not have it

    def mypyc_attr(**options):
        """Leaves the class as it is."""
        return lambda cls: cls


def tell_apart(*kinds: type[Any]) -> None:
    """Gives each compiled abstract class a register of its own: it has its base's, so `isinstance` mixes up its relatives."""
    for kind in kinds:
        if "_abc_impl" not in vars(kind):
            abc._abc_init(kind)  # type: ignore[attr-defined]
