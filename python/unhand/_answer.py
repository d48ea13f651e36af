"""What all answers have in common: a notebook and IPython's prompt show them as their text, and not as their fields."""


def fields(answer) -> dict:
    """The values of a dataclass with slots, by the names of its fields: where `to_dict()` begins."""
    return {name: getattr(answer, name) for name in answer.__slots__}


class Answer:
    """The base of the answers. `str()` is the text, `_repr_html_` what a notebook shows, `to_dict()` the plain values."""

    __slots__ = ()

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        # IPython goes class by class, and a dataclass has a `__repr__` of its own (IPython/lib/pretty.py, `pretty`).
        cls._repr_pretty_ = Answer._repr_pretty_

    def _repr_pretty_(self, printer, cycle):
        """What IPython shows as `text/plain`, and a notebook where it shows no HTML."""
        printer.text("…" if cycle else str(self))
