"""Graph to kernels: one file of rules for each family of ops. Importing the package registers all of them."""

from monoplan.codegen.lower import attention, blocks, collective, products, repeat, views, windows

__all__ = ["attention", "blocks", "collective", "products", "repeat", "views", "windows"]
