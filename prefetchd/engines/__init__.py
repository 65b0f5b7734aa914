"""Engines that prefetchd reaches by their own plug-in mechanism: one module an engine, thin on purpose."""
