import inspect

import bundle.errors
from bundle.errors import BundleError, KilnError, ResourcesShort


def test_every_class_is_in_the_drawn_tree_and_has_its_own_reason() -> None:
    kinds = [kind for _, kind in inspect.getmembers(bundle.errors, inspect.isclass) if issubclass(kind, KilnError)]
    drawing = bundle.errors.__doc__ or ""
    assert [kind.__name__ for kind in kinds if kind.__name__ not in drawing] == []
    reasons = [kind.reason for kind in kinds]
    assert len(set(reasons)) == len(reasons)
    assert all(issubclass(kind, BundleError) for kind in kinds if kind not in {KilnError, ResourcesShort})
