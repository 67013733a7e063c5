"""AdaScale SGD with sharded optimizer state for Ray Train."""

from ._version import __version__

__all__ = ["__version__"]
