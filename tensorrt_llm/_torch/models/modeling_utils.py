"""Model classes by name: an architecture's own class, and the targets of modeling_v2."""

from collections.abc import Callable
from typing import Any, TypeVar

_MODEL_CLASSES: dict[str, type[Any]] = {}

ModelClass = TypeVar("ModelClass", bound=type[Any])


def register_auto_model(name: str) -> Callable[[ModelClass], ModelClass]:
    """Class decorator: `name` is an architecture of config.json or a target's name.

    Raises:
        ValueError: the name is taken.
    """

    def register(model_class: ModelClass) -> ModelClass:
        if name in _MODEL_CLASSES:
            raise ValueError(f"{name!r} is registered already, as {_MODEL_CLASSES[name].__name__}")
        _MODEL_CLASSES[name] = model_class
        return model_class

    return register


def get_registered_model_class(name: str) -> type[Any]:
    """The class registered as `name`.

    Raises:
        ValueError: there is none.
    """
    if name not in _MODEL_CLASSES:
        raise ValueError(f"no model class is registered as {name!r}; there is {_MODEL_CLASSES}")
    return _MODEL_CLASSES[name]
