"""`burnish.single_controller.decorator` at verl's path."""

from burnish.single_controller.decorator import (
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)

__all__ = [
    "Dispatch",
    "Execute",
    "get_predefined_dispatch_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
]
