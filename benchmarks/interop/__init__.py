"""Exported heads in the engines that they were exported for."""
