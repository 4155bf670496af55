"""Pages from templates: Jinja with every value escaped. Only this module knows Jinja."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


@cache
def page_template(folder: str, name: str) -> "Template":
    """A template of this package; a value that a template names and nobody gave is an error.

    Args:
        folder: below this package; empty: this package itself.
        name: of the file; it includes others of its folder by their names.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415

    pages = Environment(
        loader=PackageLoader("enginegate.report", folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return pages.get_template(name)
